"""MiniMax-M2.7 as the vendor deploys it, small: FP8 experts, an FP8 cache, blocks of 4,096.

Its prompts are read by four pipeline stages, its answers written by four engines that share the
experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.script import run_script
from tests.minimax_checkpoint import AS_DEPLOYED, CACHE_SCALES, LAYERS, PROMPTS, make_minimax
from tests.npu.engines import OPTIONS, Job, run
from tests.npu.test_shared_experts import SCRIPT
from tests.sdk_double.launch import double_environment, read_log

pytestmark = [pytest.mark.engine, pytest.mark.wide, pytest.mark.timeout(1800)]

NUM_TOKENS = 6


@dataclass(frozen=True)
class Small:
    """The checkpoint, and answers of transformers over keys and values of e4m3."""

    path: Path
    prompts: list[list[int]]
    answers: list[list[int]]

    def job(self, **options: Any) -> Job:
        """Return an engine's life with ``options`` beyond those of the deployment."""
        return Job(
            self.path,
            AS_DEPLOYED | options,
            [self.prompts],
            NUM_TOKENS,
            reference=self.path / "plain",
            cache_scales=CACHE_SCALES,
        )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    path = make_minimax(tmp_path_factory.mktemp("minimax") / "fp8")
    unanswered = Small(path, PROMPTS, [])
    (answers,) = unanswered.job().expected()
    return Small(path, unanswered.prompts, answers)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("pipeline_parallel_size", 1),
        ("pipeline_parallel_size", LAYERS),
        # The norms of queries and keys sum over both ranks.
        ("tensor_parallel_size", 2),
    ],
)
def test_ranks_answer_as_transformers(small: Small, tmp_path: Path, name: str, ranks: int) -> None:
    ran = run([small.job(**{name: ranks})], tmp_path, devices=4)
    assert ran.answers == [[small.answers]]
    opened = [x["variables"] for x in ran.calls("environment") if x["when"] == "open"]
    assert len({found["RBLN_VISIBLE_DEVICES"] for found in opened}) == ranks


def test_four_engines_that_share_experts_answer_as_transformers(
    small: Small, tmp_path: Path
) -> None:
    rbln = {"cache_root": str(tmp_path / "cache"), "num_threads": 1}
    options = {"data_parallel_size": 4, "enable_expert_parallel": True}
    request = {
        "path": str(small.path),
        "options": OPTIONS | AS_DEPLOYED | {"additional_config": {"rbln": rbln}} | options,
        "prompts": small.prompts,
        "max_tokens": NUM_TOKENS,
    }
    log = tmp_path / "calls.jsonl"
    variables = double_environment(log, devices=4) | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    answers = run_script(SCRIPT, request, variables, timeout_s=1500, own_imports=True)
    assert answers == [small.answers, small.answers]
    opened = [x["variables"] for x in read_log(log, "environment") if x["when"] == "open"]
    assert len({found["RBLN_VISIBLE_DEVICES"] for found in opened}) == 4
