"""Adapters on several ranks are worth their merged weights, each rank with its part of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters import ATTENTION, EVERY_LINEAR, HEAD, make_adapter, merge
from tests.checkpoints import CheckpointCache
from tests.engine.parallel_runs import NUM_TOKENS, run_ranks
from tests.engine.test_equality import make_prompts
from tests.engine.test_parallel import DATA, PIPELINE, TENSOR
from tests.graph_cache import graph_cache
from tests.reference import reference_generate

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
PROMPTS = make_prompts([1, 65, 130, 66], seed=510)
# Both ranks have the only key head; a layer whose file has one matrix for q, k and v.
ONE_KEY_HEAD = {"num_key_value_heads": 1}
TARGETS = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}
EXPERTS: dict[str, Any] = {"qwen3_moe": "single", "gpt_oss": "stacked"}
WHOLE_EXPERTS = {"enable_expert_parallel": True}
wide = pytest.mark.wide


@pytest.mark.parametrize(
    ("arch", "fields", "options"),
    [
        ("llama", ONE_KEY_HEAD, TENSOR),
        pytest.param("llama", {}, PIPELINE, marks=wide),
        pytest.param("llama", {}, TENSOR | PIPELINE, marks=wide),
        pytest.param("llama", {}, DATA, marks=wide),
        pytest.param("qwen3", {}, TENSOR | DATA, marks=wide),
        pytest.param("phi3", {}, TENSOR, marks=wide),
        pytest.param("qwen3_moe", {}, TENSOR, marks=wide),
        pytest.param("qwen3_moe", {}, TENSOR | WHOLE_EXPERTS, marks=wide),
        pytest.param("gpt_oss", {}, TENSOR, marks=wide),
        pytest.param("gpt_oss", {}, TENSOR | WHOLE_EXPERTS, marks=wide),
        pytest.param("gpt_oss", {}, PIPELINE, marks=wide),
    ],
)
def test_answers_are_those_of_merged_weights(
    checkpoints: CheckpointCache,
    tmp_path: Path,
    arch: str,
    fields: dict[str, Any],
    options: dict[str, Any],
) -> None:
    checkpoint = checkpoints(arch, **fields)
    targets = (*TARGETS.get(arch, EVERY_LINEAR), *HEAD)
    experts = EXPERTS.get(arch, "no")
    one = make_adapter(
        checkpoint, tmp_path / "one", rank=16, seed=1, targets=targets, experts=experts
    )
    two = make_adapter(checkpoint, tmp_path / "two", rank=3, seed=2, targets=ATTENTION[-1:])
    adapters = [one, None, two, one]
    ranks = run_ranks(checkpoint, graph_cache(), PROMPTS, adapters=adapters, **options, **LORA)
    for number, (prompt, adapter, answer) in enumerate(zip(PROMPTS, adapters, ranks, strict=True)):
        path = checkpoint
        if adapter is not None:
            path = merge(checkpoint, adapter, tmp_path / f"merged-{number}")
        assert answer["tokens"] == reference_generate(path, prompt, NUM_TOKENS).token_ids, number
