"""Two engines over the double that share experts: answers are those of one engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import CheckpointCache
from tests.engine.script import run_script
from tests.npu.engines import ONE_CHUNK, OPTIONS, THREE_CHUNKS, TWO_BLOCKS
from tests.reference import reference_generate
from tests.sdk_double.launch import double_environment, read_log

# Wide: every start is two or four processes, a minute of two cores.
pytestmark = [pytest.mark.engine, pytest.mark.wide, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("shared_experts_script.py")
PROMPTS, NUM_TOKENS = [ONE_CHUNK, THREE_CHUNKS, TWO_BLOCKS], 6


@pytest.mark.parametrize(
    "options",
    [
        {"enable_expert_parallel": True},
        {},
        {"enable_expert_parallel": True, "tensor_parallel_size": 2},
    ],
    ids=["expert", "split", "tensor"],
)
def test_two_engines_answer_as_transformers(
    checkpoints: CheckpointCache, tmp_path: Path, options: dict[str, Any]
) -> None:
    path = checkpoints("qwen3_moe", max_position_embeddings=4096)
    expected = [reference_generate(path, prompt, NUM_TOKENS).token_ids for prompt in PROMPTS]
    rbln = {"cache_root": str(tmp_path / "cache"), "num_threads": 1}
    request = {
        "path": str(path),
        "options": OPTIONS | {"additional_config": {"rbln": rbln}} | options,
        "prompts": PROMPTS,
        "max_tokens": NUM_TOKENS,
    }
    for is_warm in (False, True):
        log = tmp_path / f"calls-{is_warm}.jsonl"
        variables = double_environment(log, devices=4) | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        answers = run_script(SCRIPT, request, variables, timeout_s=400, own_imports=True)
        assert answers == [expected, expected]
        opened = [x["variables"] for x in read_log(log, "environment") if x["when"] == "open"]
        assert len({told["RBLN_VISIBLE_DEVICES"] for told in opened}) == len(opened) > 1
        compiles = read_log(log, "compile")
        assert compiles
        assert all(call["hit"] for call in compiles) == is_warm
