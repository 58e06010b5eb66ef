"""Whole draft models beside other served models, in prompts together and in a bundle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.engine.conftest import Engines
from tests.engine.oracle import MOST, AnyLength
from tests.engine.test_draft_models import GREEDY, PROMPTS, Drafted, start
from tests.engine.test_eagle3_families import FEWER, FP8
from tests.engine.test_equality import make_prompts
from tests.engine.test_speculation import greedy, seeded
from tests.quantized_checkpoints import make_quantized_checkpoint
from tests.whole_draft_checkpoints import random_model

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("cache", ["auto", pytest.param("fp8", marks=pytest.mark.wide)])
def test_a_copy_of_a_quantised_model_drafts_for_it(
    engines: Engines, tmp_path: Path, cache: str
) -> None:
    """The draft model is not quantised; its cache is of the served model's dtype."""
    served = make_quantized_checkpoint("llama", tmp_path, FP8, intermediate_size=128)
    options = {"checkpoint": served, "kv_cache_dtype": cache}
    plain = engines.fresh("llama", **options)
    own = start(engines, served / "plain", "draft_model", rbln=FEWER, **options)
    drafted = Drafted(plain, own, "draft_model")
    drafted.check(AnyLength(MOST + 1))
    drafted.run(PROMPTS, GREEDY)
    assert drafted.share() > 0.6
    drafted.run(PROMPTS[:3], [greedy(), seeded(1), seeded(2)])


@pytest.mark.wide
@pytest.mark.parametrize("arch", ["gemma3_text", "qwen3_moe", "gpt_oss", "qwen2"])
def test_other_served_models_answer_the_same(engines: Engines, tmp_path: Path, arch: str) -> None:
    plain = engines(arch)
    model = random_model(tmp_path, plain.checkpoint, arch="llama")
    drafted = Drafted(plain, start(engines, model, "draft_model", arch=arch, rbln=FEWER))
    drafted.assert_same_after_preemption_and_hits()


@pytest.mark.wide
def test_prompts_that_share_a_chunk(engines: Engines, checkpoints: CheckpointCache) -> None:
    rbln = FEWER | {"prefill_prompts": 3}
    plain = engines("llama")
    own = start(engines, checkpoints("llama"), "draft_model", rbln=rbln)
    drafted = Drafted(plain, own, "draft_model")
    drafted.check(AnyLength(MOST + 1))
    drafted.run(make_prompts([10, 20, 12, 9], seed=51), [greedy(max_tokens=20)] * 4)
    assert drafted.share() > 0.999
    drafted.check(AnyLength())
    drafted.run(make_prompts([10, 70, 12, 90], seed=52), [greedy(), seeded(1), seeded(2), greedy()])
