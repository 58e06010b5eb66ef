"""Kinds of attention besides plain causal attention give the tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import Engines
from tests.engine.parallel_runs import assert_as_one_rank, run_ranks
from tests.engine.test_equality import GREEDY, assert_equals_reference, make_prompts
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

# Slopes by distance; chunks of 40 positions beside layers without any; layers without a cache.
ARCHITECTURES = ["falcon_rw", "llama4", "gemma4_shared"]
PROMPTS = make_prompts([1, 39, 65, 130], seed=71)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tokens_equal_the_reference_also_after_a_prefix_hit(engines: Engines, arch: str) -> None:
    for prompt in PROMPTS:
        # Before the engine: vLLM wraps classes of transformers.
        reference_generate(engines.checkpoints(arch), prompt, 33)
    engine = engines(arch)
    assert_equals_reference(engine, PROMPTS, engine.generate(PROMPTS, GREEDY))
    again = engine.generate(PROMPTS, GREEDY)
    assert any(output.num_cached_tokens for output in again)
    assert_equals_reference(engine, PROMPTS, again)


@pytest.mark.wide
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tensor_parallel_ranks_say_what_one_says(
    engines: Engines, tmp_path: Path, arch: str
) -> None:
    engine = engines(arch)
    answers = run_ranks(engine.checkpoint, tmp_path, PROMPTS, tensor_parallel_size=2)
    assert_as_one_rank(engine, PROMPTS, answers, 1e-4)
