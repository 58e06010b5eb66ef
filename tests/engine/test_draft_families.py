"""A checkpoint's own MTP layer changes no token, in every family that has one here."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.sampling_params import StructuredOutputsParams

from rbln_backend.errors import UnsupportedModelError
from tests.checkpoint_families import LAYERS
from tests.draft_checkpoints import NARROW, fitted_eagle, fitted_eagle3, random_eagle3
from tests.engine.conftest import Engine, Engines
from tests.engine.support import FEW, FEWER, MOST, AnyLength, make_prompts
from tests.engine.test_draft_models import GREEDY, PROMPTS, Drafted, record_drafts, start, texts_of
from tests.engine.test_quantized import E4M3
from tests.engine.test_speculation import OFF, WAYS, greedy, results, seeded
from tests.mtp_checkpoints import MTP_LAYERS, MtpMaker, quantized_maker
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint

pytestmark = pytest.mark.engine

MTP = {"method": "mtp", "num_speculative_tokens": MOST}
WIDE = ("glm4_moe", "ernie4_5_moe", "mimo")
"""The layer of glm4_moe is in the test of scales."""


@dataclass
class MtpFamilyRun:
    """An engine without the layer and one with a fitted layer, of one family."""

    pair: Drafted
    maker: MtpMaker


def mtp_start(engines: Engines, own: Path, **options: Any) -> Engine:
    """With too few blocks for four long requests."""
    options = {"rbln": FEW, "num_gpu_blocks_override": 34, "disable_log_stats": False} | options
    return engines.fresh(checkpoint=own, speculative_config=MTP, **options)


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[pytest.mark.wide] * (n in WIDE)) for n in MTP_LAYERS],
)
def family(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[MtpFamilyRun]:
    maker, folder = MtpMaker(request.param, engines.checkpoints), tmp_path_factory.mktemp("mtp")
    plain = engines(maker.family.served, rbln=FEW)
    own = maker.fitted(folder, texts_of(plain), last=41)
    yield MtpFamilyRun(Drafted(plain, mtp_start(engines, own), "mtp"), maker)


def test_greedy_answers_are_the_same_in_fewer_steps(family: MtpFamilyRun) -> None:
    family.pair.assert_fewer_steps(0.5)


def test_every_way_of_sampling_and_grammars_give_the_same(family: MtpFamilyRun) -> None:
    pair = family.pair
    pair.check(AnyLength())
    params = [greedy(**way) for way in WAYS] + [seeded(n, **way) for n, way in enumerate(WAYS)]
    rules = StructuredOutputsParams(regex=r"([a-z]{1,4} ){3,30}")
    (answer,) = results(pair.plain, PROMPTS[1:2], GREEDY[1:2])
    params += [
        seeded(3, structured_outputs=rules, ignore_eos=False),
        greedy(max_tokens=33, extra_args={"speculation": {"prediction": answer[0]}}),
        greedy(extra_args=OFF),
    ]
    pair.run(make_prompts([5 + 4 * n for n in range(len(params))], seed=33), params)


def test_preemption_prefix_hits_and_the_end_of_the_context(family: MtpFamilyRun) -> None:
    family.pair.assert_same_after_preemption_and_hits()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in range(1, 6))]
)
def test_requests_that_come_and_are_aborted(family: MtpFamilyRun, seed: int) -> None:
    family.pair.assert_same_with_aborts(random.Random(seed))


def test_drafts_are_those_of_the_whole_text(
    engines: Engines, family: MtpFamilyRun, tmp_path: Path
) -> None:
    """Of a random layer: after chunks, after drafts that were wrong, and after hits."""
    own = family.maker.random(tmp_path)
    wrong = Drafted(family.pair.plain, mtp_start(engines, own), "mtp")
    wrong.check(AnyLength())
    seen = record_drafts(wrong)
    prompts, params = make_prompts([130, 70, 9], seed=47), [greedy(max_tokens=12)] * 3
    for _ in range(2):
        wrong.run(prompts, params)
    assert len(seen) > 30
    for text, drafts in random.Random(8).sample(seen, 12) + seen[:3] + seen[-3:]:
        assert drafts == family.maker.drafts(own, text, MOST)
    assert wrong.share() < 0.1
    # Graphs of a start like it: weights are no part of them.
    assert wrong.own.total("rbln_compile_seconds_count", result="compiled") == 0


# ------------------------------------------------------------------------------------ mtp quantized
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "v_head_dim": 48,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
    },
    # With 128, a fitted layer guesses less than half.
    "glm4_moe": {"intermediate_size": 192, "moe_intermediate_size": 64},
    "ernie4_5_moe": {"intermediate_size": 128, "moe_intermediate_size": 64},
    "mimo": {"intermediate_size": 128},
}
BLOCKS, TENSORS = Recipe(format="fp8", block=(64, 64)), Recipe(format="fp8", block=(0, 0))
CHANNELS = Recipe(
    format="float-quantized",
    fields={
        # Two by names of the checkpoint that no part of vLLM's layer has.
        "ignore": [
            "lm_head",
            "re:.*mlp.gate$",
            f"model.layers.{LAYERS}.eh_proj",
            f"model.layers.{LAYERS}.shared_head.head",
        ]
    },
)


@dataclass
class QuantizedMtp:
    """An engine without the layer, and its maker."""

    plain: Any
    maker: MtpMaker


@pytest.fixture(
    scope="module",
    params=[
        ("deepseek_v3", BLOCKS),
        *(
            pytest.param((name, recipe), marks=pytest.mark.wide)
            for name, recipe in (
                ("glm4_moe", CHANNELS),
                ("deepseek_v3", TENSORS),
                ("deepseek_v3", CHANNELS),
                ("deepseek_v3", replace(CHANNELS, block=(64, 64))),
                ("glm4_moe", BLOCKS),
                ("glm4_moe", TENSORS),
                ("ernie4_5_moe", BLOCKS),
                ("ernie4_5_moe", CHANNELS),
                ("mimo", BLOCKS),
                ("mimo", CHANNELS),
            )
        ),
    ],
    ids=lambda case: f"{case[0]}-{case[1].format}-{case[1].block}",
)
def quantized(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> QuantizedMtp:
    (name, recipe), folder = request.param, tmp_path_factory.mktemp("quantized")
    maker = quantized_maker(name, folder, recipe, **SIZES[name])
    return QuantizedMtp(engines.fresh(checkpoint=maker.stored, rbln=FEW), maker)


def test_quantized_mtp_saves_steps_and_changes_nothing(
    engines: Engines, quantized: QuantizedMtp, tmp_path: Path
) -> None:
    own = quantized.maker.fitted(tmp_path, texts_of(quantized.plain), last=41)
    drafted = Drafted(quantized.plain, mtp_start(engines, own, rbln=FEWER), "mtp")
    drafted.assert_fewer_steps(0.5)
    drafted.check(AnyLength())
    prompts = make_prompts([100, 101, 102, 103], seed=41)
    drafted.run(prompts, [greedy(), seeded(1), seeded(2, frequency_penalty=0.3), greedy()])


def test_drafts_are_those_of_the_dequantized_layer(
    engines: Engines, quantized: QuantizedMtp, tmp_path: Path
) -> None:
    own = quantized.maker.random(tmp_path)
    drafted = Drafted(quantized.plain, mtp_start(engines, own, rbln=FEWER), "mtp")
    assert_right_drafts(drafted, quantized.maker, own)
    drafted.run(PROMPTS[:3], [greedy(), seeded(1), seeded(2)])
    assert drafted.share() < 0.1


def assert_right_drafts(drafted: Drafted, maker: MtpMaker, own: Path) -> None:
    """Assert that the random layer in ``own`` drafts as transformers does."""
    drafted.check(AnyLength())
    seen = record_drafts(drafted)
    drafted.own.generate(make_prompts([130, 70, 9], seed=47), greedy(max_tokens=12))
    assert len(seen) > 15
    for text, drafts in random.Random(8).sample(seen, 12):
        assert drafts == maker.drafts(own, text, MOST)


def half_left(engines: Engines, folder: Path) -> MtpMaker:
    """Return a maker of DeepSeek-V3 in blocks, whose MTP layer is left in floats."""
    sizes = SIZES["deepseek_v3"]
    layer = engines.checkpoints(
        "deepseek_v3", num_hidden_layers=1, seed=9, first_k_dense_replace=0, **sizes
    )
    prefix = "model.layers.0."
    left = [
        f"model.layers.{LAYERS}.{name.removeprefix(prefix).removesuffix('.weight')}"
        for name in load_file(layer / "model.safetensors")
        if name.startswith(prefix) and "_proj" in name
    ]
    recipe = replace(BLOCKS, fields={"modules_to_not_convert": left})
    served = make_quantized_checkpoint("deepseek_v3", folder, recipe, **sizes)
    return MtpMaker("deepseek_v3", lambda _, **own: layer if "seed" in own else served)


def test_a_layer_that_the_checkpoint_leaves_in_floats(engines: Engines, tmp_path: Path) -> None:
    """By the names of ``modules_to_not_convert``; a layer without them needs scales."""
    maker = half_left(engines, tmp_path / "served")
    own = maker.random(tmp_path / "own")
    engine = mtp_start(engines, own, rbln=FEWER)
    assert_right_drafts(Drafted(engine, engine, "mtp"), maker, own)
    config = json.loads((own / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = []
    (own / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"lack weights .*q_b_proj\.weight_scale_inv"):
        mtp_start(engines, own)


def test_a_quantized_projection_of_hidden_states_is_refused(
    engines: Engines, quantized: QuantizedMtp, tmp_path: Path
) -> None:
    """vLLM's layers hold it in floats, as published checkpoints do."""
    own, name = quantized.maker.random(tmp_path), quantized.maker.family.projection
    tensors = load_file(own / "mtp.safetensors")
    save_file(tensors | {f"{name}.weight_scale_inv": torch.ones(2, 4)}, own / "mtp.safetensors")
    with pytest.raises(UnsupportedModelError, match=rf"draft model {own}.*proj\.weight_scale_inv'"):
        mtp_start(engines, own)


# ---------------------------------------------------------------------------------- eagle3 families
FP8 = Recipe(format="fp8", block=(64, 64))


@pytest.mark.wide
@pytest.mark.parametrize(
    "arch", ["qwen3", "minimax_m2", "qwen2", "qwen3_moe", "mistral_full", "gpt_oss"]
)
def test_eagle3_saves_steps_and_changes_nothing(
    engines: Engines, tmp_path: Path, arch: str
) -> None:
    plain = engines(arch)
    own = fitted_eagle3(tmp_path, plain.checkpoint, texts_of(plain), last=41)
    run_beside(plain, start(engines, own, "eagle3", arch=arch, rbln=FEWER), "eagle3", 0.6)


@pytest.mark.parametrize(
    ("arch", "recipe", "cache", "share"),
    [
        ("minimax_m2", FP8, "auto", 0.6),
        # The layer is fitted to states over keys and values that are not rounded.
        pytest.param("minimax_m2", FP8, "fp8", 0.3, marks=pytest.mark.wide),
        pytest.param("llama", Recipe(bits=4, group_size=64), "auto", 0.6, marks=pytest.mark.wide),
    ],
)
def test_quantised_models_answer_the_same(
    engines: Engines, tmp_path: Path, arch: str, recipe: Recipe, cache: str, share: float
) -> None:
    """The layer is not quantised; its cache is of the served model's dtype."""
    served = make_quantized_checkpoint(arch, tmp_path / "served", recipe, intermediate_size=128)
    options: dict[str, Any] = {"checkpoint": served, "kv_cache_dtype": cache}
    plain = engines.fresh(arch, rbln=FEW, **options)
    own = fitted_eagle3(tmp_path / "own", served / "plain", texts_of(plain), last=41)
    engine = start(engines, own, "eagle3", arch=arch, rbln=FEWER, **options)
    run_beside(plain, engine, "eagle3", share)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, LAYERS + 1]},
            rf"eagle_aux_hidden_state_layer_ids must be 3 layers from 0 to {LAYERS}, got "
            rf"\[1, 2, {LAYERS + 1}\]",
        ),
        ({"target_hidden_size": 64}, "hidden_size must be the served model's, 128, got 64"),
        ({"lost": "lm_head"}, r"lm_head\.weight must be in the checkpoint"),
        ({**NARROW, "lost": "embed_tokens"}, r"embed_tokens\.weight must be in the"),
    ],
)
def test_layers_that_do_not_fit_are_refused(
    engines: Engines, tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    served, lost = engines.checkpoints("llama"), fields.get("lost")
    own = random_eagle3(tmp_path, served, **{n: v for n, v in fields.items() if n != "lost"})
    if lost is not None:
        weights = load_file(own / "model.safetensors")
        kept = {name: tensor for name, tensor in weights.items() if lost not in name}
        save_file(kept, own / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=text):
        start(engines, own, "eagle3")


# ------------------------------------------------------------------------------- draft layer caches
# So coarse that drafts depend on the rounding, and on which scale is whose.
SCALES = ((4.0, 2.0), (2.0, 8.0), (64.0, 16.0))


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


def scales_of(engine: Any) -> list[tuple[float, float]]:
    """Return the scales of keys and values by layer, the draft layer's last."""
    layers = engine.core.vllm_config.compilation_config.static_forward_context.values()
    found = [layer for layer in layers if hasattr(layer, "_k_scale")]
    assert {layer.kv_cache_dtype for layer in found} == {"fp8"}
    pairs = [(layer._k_scale.detach(), layer._v_scale.detach()) for layer in found]
    return [(float(k_scale), float(v_scale)) for k_scale, v_scale in pairs]


def test_a_layer_of_eagle(engines: Engines, tmp_path: Path) -> None:
    """It is not quantised, so that vLLM has no scales for it: they are 1.0."""
    plain = engines.fresh("llama", rbln=FEW, **E4M3)
    # Fitted to states over keys and values that are not rounded.
    own = fitted_eagle(tmp_path, plain.checkpoint, texts_of(plain), last=41)
    engine = start(engines, own, "eagle", rbln=FEWER, **E4M3)
    run_beside(plain, engine, "eagle", 0.3)
    assert scales_of(engine) == [(1.0, 1.0)] * (LAYERS + 1)


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
    plain = engines.fresh(checkpoint=wrong, rbln=FEW, **E4M3)
    own = maker.fitted(tmp_path / "fitted", texts_of(plain), last=41)
    engine = mtp_start(engines, own, rbln=FEWER, **E4M3)
    run_beside(plain, engine, "mtp", 0.3)
    assert scales_of(engine) == list(SCALES)
    drafted = Drafted(plain, mtp_start(engines, wrong, rbln=FEWER, **E4M3), "mtp")
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
    plain = engines.fresh("glm4_moe", rbln=FEW, **E4M3)
    own = maker.fitted(tmp_path, texts_of(plain), last=41)
    engine = mtp_start(engines, own, rbln=FEWER, **E4M3)
    run_beside(plain, engine, "mtp", 0.3)
    assert scales_of(engine) == [(1.0, 1.0)] * (LAYERS + 1)
