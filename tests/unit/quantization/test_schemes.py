"""Which quantised checkpoints are refused: the field, the value and the documented reason."""

from __future__ import annotations

from typing import Any

import pytest

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.layers.schemes import (
    CHANNEL,
    Weights,
    check_awq,
    check_compressed_tensors,
    check_fp8,
    check_gptq,
    check_modelopt,
    summary,
)
from tests.quantized_checkpoints import Recipe, quantization_config

KNOWN = [
    Recipe(format=written, bits=bits, group_size=group)  # type: ignore[arg-type]
    for written in ("gptq", "compressed-tensors")
    for bits in (4, 8)
    for group in (64, 128, CHANNEL)
] + [
    Recipe(symmetric=False),
    Recipe(format="awq", group_size=128),
    *(
        Recipe(format=written, block=block, static=static)  # type: ignore[arg-type]
        for written in ("fp8", "float-quantized", "int-quantized")
        for block, static in (((0, 0), True), ((128, 128), False))
    ),
    Recipe(format="float-quantized", block=(1, 0)),
    Recipe(format="modelopt", block=(0, 0)),
    Recipe(format="modelopt-mixed", block=(0, 0)),
]
CHECKS = {
    "gptq": check_gptq,
    "awq": check_awq,
    "fp8": check_fp8,
    "modelopt": check_modelopt,
    "compressed-tensors": check_compressed_tensors,
}


def check(config: dict[str, Any]) -> None:
    CHECKS[config["quant_method"]](config)


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
        ("weights", {"group_size": 32}, "weights.group_size is 32", "Group size 32 not supported"),
        ("weights", {"actorder": "group"}, "weights.actorder is 'group'", "ordering not supported"),
        ("weights", {"strategy": "tensor"}, "weights.strategy is 'tensor'", "per group or channel"),
        ("weights", {"dynamic": True}, "weights.dynamic is True", "per group or channel"),
        ("group", {"output_activations": {"num_bits": 8}}, "output_activations", "outputs not"),
        ("group", {"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-", "not supported"),
        ("group", {"input_activations": {"num_bits": 8}}, "input_activations", "activations not"),
        (
            "config",
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}},
            "kv_cache_scheme.strategy is 'attn_head'",
            "remove kv_cache_scheme",
        ),
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


@pytest.mark.parametrize(
    ("fields", "named", "reason"),
    [
        ({"num_bits": 4}, "weights.num_bits is 4", "Weight type float4 not supported"),
        ({"symmetric": False}, "weights.symmetric is False", "Asymmetric quantization"),
        ({"strategy": "group"}, "weights.strategy is 'group'", "tensor or channel or block"),
        (
            {"strategy": "block", "block_structure": [128, 96]},
            "weights.block_structure is [128, 96]",
            "a multiple of 64 inputs",
        ),
    ],
)
def test_refusals_of_bytes(fields: dict[str, Any], named: str, reason: str) -> None:
    config = quantization_config(Recipe(format="float-quantized"))
    config["config_groups"]["group_0"]["weights"].update(fields)
    with pytest.raises(UnsupportedModelError) as caught:
        check(config)
    assert named in str(caught.value)
    assert reason in str(caught.value)


def test_integers_in_bytes_come_with_activations() -> None:
    config = quantization_config(Recipe(format="int-quantized"))
    config["config_groups"]["group_0"]["input_activations"] = None
    with pytest.raises(UnsupportedModelError, match="input_activations is None: vLLM reads"):
        check(config)


@pytest.mark.parametrize(
    ("written", "fields", "named", "reason"),
    [
        ("fp8", {"fmt": "e5m2"}, "fmt is 'e5m2'", "Weight type e5m2 not supported"),
        ("fp8", {"weight_block_size": [1, 32]}, "weight_block_size is [1, 32]", "multiple of 64"),
        ("fp8", {"weight_block_size": [128]}, "weight_block_size is [128]", "blocks of rows"),
        ("fp8", {"store_dtype": "mxfp4"}, "store_dtype is 'mxfp4'", "weights of e4m3"),
        ("awq", {"version": "gemv"}, "version is 'gemv'", "Weight order gemv not supported"),
        ("awq", {"bits": 8}, "bits is 8", "Weight type int8 not supported"),
        ("awq", {"group_size": 32}, "group_size is 32", "Group size 32 not supported"),
        ("awq", {"zero_point": False}, "zero_point is False", "with zero points"),
    ],
)
def test_refusals_of_fp8_and_awq(
    written: Any, fields: dict[str, Any], named: str, reason: str
) -> None:
    config = quantization_config(Recipe(format=written, block=(128, 128))) | fields
    with pytest.raises(UnsupportedModelError) as caught:
        check(config)
    for part in (f"quantization_config.{named}", reason, "bfloat16 copy"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'"),
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        ({"quant_algo": "fp8_pb_wo"}, "quant_algo is 'fp8_pb_wo'"),
        # As hf_quant_config.json has it.
        ({"quantization": {"quant_algo": "MXFP8"}}, "quant_algo is 'MXFP8'"),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}},
            },
            "quantized_layers['b'].quant_algo is 'NVFP4'",
        ),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a.experts": {"quant_algo": "NVFP4", "group_size": 64}},
            },
            "quantized_layers['a.experts'].group_size is 64",
        ),
    ],
)
def test_refusals_of_modelopt(fields: dict[str, Any], named: str) -> None:
    config = quantization_config(Recipe(format="modelopt", block=(0, 0))) | fields
    with pytest.raises(UnsupportedModelError) as caught:
        check(config)
    for part in (f"quantization_config.{named}", "NVFP4", "bfloat16 copy"):
        assert part in str(caught.value)


@pytest.mark.parametrize("algorithm", ["NVFP4", "w4a16_nvfp4"])
def test_experts_in_nvfp4_are_taken(algorithm: str) -> None:
    layers = {"model.layers.0.mlp.experts.0.up_proj": {"quant_algo": algorithm, "group_size": 16}}
    recipe = Recipe(format="modelopt", block=(0, 0))
    named = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    check(quantization_config(recipe) | named)


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
    assert [
        str(Weights(bits=8, group_size=128, kind="float", published="FP8 W8A8")),
        str(Weights(bits=4, group_size=32, kind="float")),
        str(Weights(bits=4, group_size=64, symmetric=False)),
    ] == [
        "W8A16 FP8 group 128 (published as FP8 W8A8)",
        "W4A16 MXFP4 group 32",
        "W4A16 group 64 with zero points",
    ]
