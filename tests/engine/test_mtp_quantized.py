"""MTP layers of quantised checkpoints change no token, and draft what their weights mean."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rbln_backend.errors import UnsupportedModelError
from tests.engine.conftest import Engines
from tests.engine.support import MOST, AnyLength, make_prompts
from tests.engine.test_draft_models import GREEDY, PROMPTS, Drafted, record_drafts
from tests.engine.test_mtp import start
from tests.engine.test_speculation import greedy, results, seeded
from tests.mtp_checkpoints import MtpMaker, quantized_maker
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint

pytestmark = pytest.mark.engine

SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "v_head_dim": 48,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
    },
    "glm4_moe": {"intermediate_size": 128, "moe_intermediate_size": 64},
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
            "model.layers.3.eh_proj",
            "model.layers.3.shared_head.head",
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
        ("glm4_moe", CHANNELS),
        *(
            pytest.param((name, recipe), marks=pytest.mark.wide)
            for name, recipe in (
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
    return QuantizedMtp(engines.fresh(checkpoint=maker.stored), maker)


def test_right_drafts_save_steps_and_change_nothing(
    engines: Engines, quantized: QuantizedMtp, tmp_path: Path
) -> None:
    answers = results(quantized.plain, PROMPTS, GREEDY)
    texts = [prompt + list(answer[0]) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    own = quantized.maker.fitted(tmp_path, texts, last=41)
    drafted = Drafted(quantized.plain, start(engines, own), "mtp")
    drafted.assert_fewer_steps(0.5)
    drafted.check(AnyLength())
    prompts = make_prompts([100, 101, 102, 103], seed=41)
    drafted.run(prompts, [greedy(), seeded(1), seeded(2, frequency_penalty=0.3), greedy()])


def test_drafts_are_those_of_the_dequantized_layer(
    engines: Engines, quantized: QuantizedMtp, tmp_path: Path
) -> None:
    own = quantized.maker.random(tmp_path)
    drafted = Drafted(quantized.plain, start(engines, own), "mtp")
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
        f"model.layers.3.{name.removeprefix(prefix).removesuffix('.weight')}"
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
    engine = start(engines, own)
    assert_right_drafts(Drafted(engine, engine, "mtp"), maker, own)
    config = json.loads((own / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = []
    (own / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"lack weights .*q_b_proj\.weight_scale_inv"):
        start(engines, own)


def test_a_quantized_projection_of_hidden_states_is_refused(
    engines: Engines, quantized: QuantizedMtp, tmp_path: Path
) -> None:
    """vLLM's layers hold it in floats, as published checkpoints do."""
    own, name = quantized.maker.random(tmp_path), quantized.maker.family.projection
    tensors = load_file(own / "mtp.safetensors")
    save_file(tensors | {f"{name}.weight_scale_inv": torch.ones(2, 4)}, own / "mtp.safetensors")
    with pytest.raises(UnsupportedModelError, match=rf"draft model {own}.*proj\.weight_scale_inv'"):
        start(engines, own)
