"""Latent attention: tokens of transformers from a cache of one compressed head."""

from __future__ import annotations

from pathlib import Path

import pytest

from rbln_backend.errors import UnsupportedModelError
from tests.engine.conftest import Engines
from tests.engine.parallel_runs import assert_as_one_rank, run_ranks
from tests.engine.test_equality import GREEDY, assert_equals_reference, make_prompts

pytestmark = pytest.mark.engine

PROMPTS = make_prompts([1, 17, 64, 130], seed=70)


def test_tokens_equal_the_reference_also_after_a_prefix_hit(engines: Engines) -> None:
    engine = engines("deepseek_v3")
    assert_equals_reference(engine, PROMPTS, engine.generate(PROMPTS, GREEDY))
    # 48 compressed numbers and 16 rotated ones of a token, for four heads of 40 and 40.
    assert {cache.shape[1:] for cache in engine.kv_caches()} == {(1, 1, 1, 16, 64)}
    again = engine.generate(PROMPTS, GREEDY)
    assert any(output.num_cached_tokens for output in again)
    assert_equals_reference(engine, PROMPTS, again)


@pytest.mark.wide
def test_without_native_kernels(engines: Engines) -> None:
    engine = engines("deepseek_v2", rbln={"kernels": "aten"})
    assert_equals_reference(engine, PROMPTS, engine.generate(PROMPTS, GREEDY))


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ],
)
def test_ranks_say_what_one_says(
    engines: Engines, tmp_path: Path, options: dict[str, object]
) -> None:
    engine = engines("deepseek_v2_groups")
    answers = run_ranks(engine.checkpoint, tmp_path, PROMPTS, **options)
    assert_as_one_rank(engine, PROMPTS, answers, 1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rbln": {"use_custom_kernel": True}}, "take no compressed keys"),
        ({"enable_lora": True, "max_lora_rank": 8}, "adapters of models that vLLM does not adapt"),
    ],
)
def test_what_it_excludes_is_refused(
    engines: Engines, options: dict[str, object], text: str
) -> None:
    with pytest.raises((UnsupportedModelError, RuntimeError, ValueError), match=text):
        engines.fresh("deepseek_v2", **options)
