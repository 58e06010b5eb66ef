"""Layers of drafts over a KV cache of e4m3 change no token, and have the checkpoint's scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.draft_checkpoints import fitted_eagle
from tests.engine import test_draft_models, test_mtp
from tests.engine.conftest import Engines
from tests.engine.support import MOST, AnyLength, make_prompts
from tests.engine.test_draft_models import GREEDY, PROMPTS, Drafted, record_drafts
from tests.engine.test_eagle3_families import FEWER
from tests.engine.test_mtp_quantized import BLOCKS, CHANNELS, SIZES, TENSORS
from tests.engine.test_quantized import E4M3
from tests.engine.test_speculation import greedy, results, seeded
from tests.mtp_checkpoints import MtpMaker, quantized_maker
from tests.quantized_checkpoints import Recipe

pytestmark = pytest.mark.engine

# So coarse that drafts depend on the rounding, and on which scale is whose.
SCALES = ((4.0, 2.0), (2.0, 8.0), (8.0, 1.0), (64.0, 16.0))


def run_beside(plain: Any, own: Any, method: str, share: float) -> Drafted:
    """Assert the same tokens with drafts, more than ``share`` of which are accepted."""
    drafted = Drafted(plain, own, method)
    drafted.check(AnyLength(MOST + 1))
    drafted.run(PROMPTS, GREEDY)
    assert drafted.share() > share
    drafted.check(AnyLength())
    prompts = make_prompts([100, 101, 102, 103], seed=41)
    drafted.run(prompts, [greedy(), seeded(1), seeded(2, frequency_penalty=0.3), greedy()])
    return drafted


def texts_of(plain: Any) -> list[list[int]]:
    answers = results(plain, PROMPTS, GREEDY)
    return [prompt + list(answer[0]) for prompt, answer in zip(PROMPTS, answers, strict=True)]


def scales_of(engine: Any) -> list[tuple[float, float]]:
    """Return the scales of keys and values by layer, the draft layer's last."""
    layers = engine.core.vllm_config.compilation_config.static_forward_context.values()
    found = [layer for layer in layers if hasattr(layer, "_k_scale")]
    assert {layer.kv_cache_dtype for layer in found} == {"fp8"}
    pairs = [(layer._k_scale.detach(), layer._v_scale.detach()) for layer in found]
    return [(float(k_scale), float(v_scale)) for k_scale, v_scale in pairs]


def test_a_layer_of_eagle(engines: Engines, tmp_path: Path) -> None:
    """It is not quantised, so that vLLM has no scales for it: they are 1.0."""
    plain = engines.fresh("llama", **E4M3)
    # Fitted to states over keys and values that are not rounded.
    own = fitted_eagle(tmp_path, plain.checkpoint, texts_of(plain), last=41)
    engine = test_draft_models.start(engines, own, "eagle", rbln=FEWER, **E4M3)
    run_beside(plain, engine, "eagle", 0.3)
    assert scales_of(engine) == [(1.0, 1.0)] * 4


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("glm4_moe", TENSORS),
        *(
            pytest.param(name, recipe, marks=pytest.mark.wide)
            for name, recipe in (
                ("glm4_moe", BLOCKS),
                ("glm4_moe", CHANNELS),
                ("ernie4_5_moe", BLOCKS),
                ("mimo", BLOCKS),
            )
        ),
    ],
)
def test_scales_of_an_mtp_layer_are_the_checkpoints(
    engines: Engines, tmp_path: Path, name: str, recipe: Recipe
) -> None:
    folder = tmp_path / "made"
    maker = quantized_maker(name, folder, recipe, cache_scales=SCALES, **SIZES[name])
    wrong = maker.random(tmp_path / "random")
    plain = engines.fresh(checkpoint=wrong, **E4M3)
    own = maker.fitted(tmp_path / "fitted", texts_of(plain), last=41)
    engine = test_mtp.start(engines, own, rbln=FEWER, **E4M3)
    run_beside(plain, engine, "mtp", 0.3)
    assert scales_of(engine) == list(SCALES)
    drafted = Drafted(plain, test_mtp.start(engines, wrong, rbln=FEWER, **E4M3), "mtp")
    same = share_of_same_drafts(drafted, maker, wrong)
    assert same > 0.9


def share_of_same_drafts(drafted: Drafted, maker: MtpMaker, own: Path) -> float:
    """Return the share of drafts that are transformers'.

    Sums of another order can end on the other side of a rounding.
    """
    drafted.check(AnyLength())
    seen = record_drafts(drafted)
    drafted.own.generate(make_prompts([130, 70, 9], seed=47), greedy(max_tokens=12))
    pairs = [(drafts, maker.drafts(own, text, MOST)) for text, drafts in seen[:15]]
    assert len(pairs) == 15
    return sum(ours == theirs for ours, theirs in pairs) / len(pairs)


@pytest.mark.wide
def test_an_mtp_layer_of_floats_has_scales_of_one(engines: Engines, tmp_path: Path) -> None:
    maker = MtpMaker("glm4_moe", engines.checkpoints)
    plain = engines.fresh("glm4_moe", **E4M3)
    own = maker.fitted(tmp_path, texts_of(plain), last=41)
    engine = test_mtp.start(engines, own, rbln=FEWER, **E4M3)
    run_beside(plain, engine, "mtp", 0.3)
    assert scales_of(engine) == [(1.0, 1.0)] * 4
