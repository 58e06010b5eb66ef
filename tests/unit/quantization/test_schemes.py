"""Which quantised checkpoints are refused: the field, the value and the documented reason."""

from __future__ import annotations

from typing import Any

import pytest

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.quantization.schemes import (
    Weights,
    check_compressed_tensors,
    check_gptq,
    summary,
)
from tests.quantized_checkpoints import CHANNEL, Recipe, quantization_config

KNOWN = [
    Recipe(format=written, bits=bits, group_size=group)  # type: ignore[arg-type]
    for written in ("gptq", "compressed-tensors")
    for bits in (4, 8)
    for group in (64, 128, CHANNEL)
]


def check(config: dict[str, Any]) -> None:
    if config["quant_method"] == "gptq":
        check_gptq(config)
    else:
        check_compressed_tensors(config)


@pytest.mark.parametrize("recipe", KNOWN, ids=str)
def test_the_documented_weights_are_taken(recipe: Recipe) -> None:
    check(quantization_config(recipe))


@pytest.mark.parametrize(
    ("fields", "named", "reason"),
    [
        ({"bits": 3}, "bits is 3", "Weight type int3 not supported"),
        ({"sym": False}, "sym is False", "Asymmetric quantization not supported"),
        ({"group_size": 32}, "group_size is 32", "Group size 32 not supported"),
        ({"desc_act": True}, "desc_act is True", "Group/dynamic activation ordering not supported"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'", "marlin not supported"),
        (
            {"dynamic": {"+:.*down.*": {"group_size": 256}}},
            "dynamic['+:.*down.*'].group_size is 256",
            "Group size 256 not supported",
        ),
    ],
)
def test_gptq_refusals(fields: dict[str, Any], named: str, reason: str) -> None:
    config = quantization_config(Recipe(format="gptq", bits=4, group_size=128)) | fields
    with pytest.raises(UnsupportedModelError) as caught:
        check(config)
    for part in (f"quantization_config.{named}", reason, "bfloat16 copy"):
        assert part in str(caught.value)


def test_orders_and_rules_that_change_nothing_are_taken() -> None:
    channel = quantization_config(Recipe(format="gptq", bits=8, group_size=CHANNEL))
    # With one scale per channel there are no groups to be out of order.
    check(channel | {"desc_act": True})
    check(channel | {"dynamic": {"-:.*lm_head.*": {}, "+:.*": {"bits": 4}}})


@pytest.mark.parametrize(
    ("place", "fields", "named", "reason"),
    [
        ("weights", {"num_bits": 2}, "weights.num_bits is 2", "Weight type int2 not supported"),
        ("weights", {"type": "float"}, "is 4", "Weight type float4 not supported"),
        ("weights", {"symmetric": False}, "weights.symmetric is False", "Asymmetric quantization"),
        ("weights", {"group_size": 32}, "weights.group_size is 32", "Group size 32 not supported"),
        ("weights", {"actorder": "group"}, "weights.actorder is 'group'", "ordering not supported"),
        ("weights", {"strategy": "tensor"}, "weights.strategy is 'tensor'", "per group or channel"),
        ("weights", {"dynamic": True}, "weights.dynamic is True", "per group or channel"),
        ("group", {"format": "float-quantized"}, "format is 'float-quantized'", "not supported"),
        ("group", {"input_activations": {"num_bits": 8}}, "input_activations", "activations not"),
        ("config", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme", "only weights"),
        ("config", {"transform_config": {"a": 1}}, "transform_config", "only weights"),
    ],
)
def test_compressed_tensors_refusals(
    place: str, fields: dict[str, Any], named: str, reason: str
) -> None:
    config = quantization_config(Recipe(bits=4, group_size=128))
    group = config["config_groups"]["group_0"]
    {"config": config, "group": group, "weights": group["weights"]}[place].update(fields)
    with pytest.raises(UnsupportedModelError) as caught:
        check(config)
    text = str(caught.value)
    assert text.startswith("quantization_config.")
    assert named in text
    assert reason in text


def test_weights_that_were_ordered_before_are_taken() -> None:
    config = quantization_config(Recipe(bits=4, group_size=128))
    config["config_groups"]["group_0"]["weights"]["actorder"] = "static"
    check(config)


def test_what_a_model_says_of_its_layers() -> None:
    four, eight = Weights(bits=4, group_size=128), Weights(bits=8, group_size=CHANNEL)
    assert summary([]) is None
    assert summary([str(four), str(four), str(eight)]) == (
        "2 layers W4A16 group 128, 1 layer W8A16 channel"
    )
