"""Runs of engines of several ranks, and what one rank says to the same prompts."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.conftest import DEFAULTS, Engine
from tests.engine.script import run_script
from tests.kernel_cache import share_kernels

SCRIPT = Path(__file__).parent / "generate_script.py"
NUM_TOKENS = 33
TIMEOUT_S = 280


def run_ranks(
    checkpoint: Path,
    cache_root: Path,
    prompts: list[list[int]],
    *,
    environment: dict[str, str] | None = None,
    adapters: Sequence[Path | None] = (),
    checks_all_drafts: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Answers of an engine with ``options`` beyond the tests' own, in a process of its own.

    ``adapters`` has one or none for each prompt. ``checks_all_drafts``: whatever they gain.
    """
    inherited = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    root = Path(__file__).parents[2]
    ours = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH")))),
        "VLLM_PLUGINS": "rbln",
        "VLLM_CACHE_ROOT": str(share_kernels(cache_root)),
    }
    if checks_all_drafts:
        # A function is sent to the engines.
        ours["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    one_thread = {"additional_config": {"rbln": {"num_threads": 1}}}
    folders = [None if path is None else str(path) for path in adapters]
    argument = [
        str(checkpoint),
        DEFAULTS | one_thread | options,
        prompts,
        NUM_TOKENS,
        folders,
        checks_all_drafts,
    ]
    answers: list[dict[str, Any]] = run_script(
        SCRIPT, argument, inherited | ours | (environment or {}), timeout_s=TIMEOUT_S
    )
    return answers


def assert_as_one_rank(
    engine: Engine, prompts: list[list[int]], answers: list[dict[str, Any]], tolerance: float
) -> None:
    """Every token as ``engine`` says it; every log-probability within ``tolerance``."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    for output, answer in zip(engine.generate(prompts, params), answers, strict=True):
        (alone,) = output.outputs
        assert answer["tokens"] == list(alone.token_ids)
        logprobs = [
            entry[token].logprob
            for token, entry in zip(alone.token_ids, alone.logprobs, strict=True)
        ]
        assert answer["logprobs"] == pytest.approx(logprobs, abs=tolerance)
