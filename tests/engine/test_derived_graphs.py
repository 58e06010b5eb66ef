"""Graphs that a start derives from others equal their own traces, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rbln_backend.worker.graphs.trace_plan import TracePlan
from tests.engine.conftest import Engine, Engines
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint

pytestmark = pytest.mark.engine

# Chunks of 16 to 128 tokens with 1 to 8 prompts, and batches of 1 to 8.
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 128}
DERIVED = {"prefill-64", "decode-4"}


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_moe"])
def test_derived_graphs_equal_their_own_traces(arch: str, engines: Engines) -> None:
    """Plain attention, sliding windows, experts."""
    compare(engines.fresh(arch, **SIZES))


def test_derived_graphs_of_a_quantized_model_equal_their_own_traces(
    engines: Engines, tmp_path: Path
) -> None:
    checkpoint = make_quantized_checkpoint("llama", tmp_path, Recipe(bits=4, group_size=64))
    compare(engines.fresh(checkpoint=checkpoint, **SIZES))


def compare(engine: Engine) -> None:
    build = engine.core.model_executor.driver_worker.worker._build
    factory, requests = build._factory, {x.spec: x for x in build._requests()}
    stored = {spec: factory._stored(request) for spec, request in requests.items()}
    plan, derived = TracePlan(list(requests), lambda *_: None), {}
    while plan.wanted:
        spec = plan.wanted[0]
        derived |= dict(plan.add(spec, stored[spec]))
    assert {str(spec) for spec in derived} == DERIVED
    for spec, program in derived.items():
        own = factory._capture(requests[spec]).to_bytes()
        assert program.to_bytes() == own
        assert stored[spec].to_bytes() == own
