"""Which quantised checkpoints are refused: the field, the value and the documented reason."""

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config

from rbln_backend.devices.emulated.packing import dequantize
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.layers import quantized_linear
from rbln_backend.layers.quantized_linear import ByteWeights, RblnByteScheme
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
from tests.quantized_checkpoints import Recipe, floats, integers, quantization_config

pytestmark = pytest.mark.usefixtures("native_kernels")

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


GPTQ, INT4 = Recipe(format="gptq", group_size=128), Recipe(group_size=128)
INT8 = Recipe(format="int-quantized")
BYTES, OPT = Recipe(format="float-quantized"), Recipe(format="modelopt", block=(0, 0))
BLOCKS, AWQ = Recipe(format="fp8", block=(128, 128)), Recipe(format="awq")
LONG_GROUP = {"+:.*down.*": {"group_size": 256}}
HEADS = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}}
MIXED = {"quant_algo": "MIXED_PRECISION"}
PLAIN = MIXED | {"quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}}}
LONG = MIXED | {"quantized_layers": {"a.experts": {"quant_algo": "NVFP4", "group_size": 64}}}
ORDER, GROUPS = "activation ordering not supported", "per group or channel"
REFUSALS: list[tuple[Recipe, str, dict[str, Any], str, str]] = [
    # The fields of the recipe's configuration at a place of it, and what is said of them.
    (GPTQ, "config", {"bits": 3}, "bits is 3", "Weight type int3 not supported"),
    (GPTQ, "config", {"sym": False}, "sym is False", "Asymmetric quantization not supported"),
    (GPTQ, "config", {"group_size": 32}, "group_size is 32", "Group size 32 not supported"),
    (GPTQ, "config", {"desc_act": True}, "desc_act is True", f"Group/dynamic {ORDER}"),
    (GPTQ, "config", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'", "marlin"),
    (GPTQ, "config", {"dynamic": LONG_GROUP}, "dynamic['+:.*down.*'].group_size is 256", "256 not"),
    (INT4, "weights", {"num_bits": 2}, "weights.num_bits is 2", "Weight type int2 not supported"),
    (INT4, "weights", {"type": "float"}, "is 4", "Weight type float4"),
    (INT4, "weights", {"group_size": 32}, "weights.group_size is 32", "Group size 32 not"),
    (INT4, "weights", {"actorder": "group"}, "weights.actorder is 'group'", "ordering not"),
    (INT4, "weights", {"strategy": "tensor"}, "weights.strategy is 'tensor'", GROUPS),
    (INT4, "weights", {"dynamic": True}, "weights.dynamic is True", GROUPS),
    (INT4, "group", {"output_activations": {"num_bits": 8}}, "output_activations", "outputs not"),
    (INT4, "group", {"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-", "not supported"),
    (INT4, "group", {"input_activations": {"num_bits": 8}}, "input_activations", "activations not"),
    (INT4, "config", HEADS, "kv_cache_scheme.strategy is 'attn_head'", "remove kv_cache_scheme"),
    (INT4, "config", {"transform_config": {"a": 1}}, "transform_config", "only weights"),
    (BYTES, "weights", {"num_bits": 4}, "weights.num_bits is 4", "Weight type float4"),
    (BYTES, "weights", {"symmetric": False}, "weights.symmetric is False", "Asymmetric"),
    (BYTES, "weights", {"strategy": "group"}, "weights.strategy is 'group'", "tensor or channel"),
    (
        BYTES,
        "weights",
        {"strategy": "block", "block_structure": [128, 96]},
        "weights.block_structure is [128, 96]",
        "a multiple of 64 inputs",
    ),
    (INT8, "group", {"input_activations": None}, "input_activations is None", "vLLM reads"),
    (BLOCKS, "config", {"fmt": "e5m2"}, "fmt is 'e5m2'", "Weight type e5m2 not supported"),
    (BLOCKS, "config", {"weight_block_size": [1, 32]}, "weight_block_size is [1, 32]", "of 64"),
    (BLOCKS, "config", {"weight_block_size": [128]}, "weight_block_size is [128]", "of rows"),
    (BLOCKS, "config", {"store_dtype": "mxfp4"}, "store_dtype is 'mxfp4'", "weights of e4m3"),
    (AWQ, "config", {"version": "gemv"}, "version is 'gemv'", "Weight order gemv not supported"),
    (AWQ, "config", {"bits": 8}, "bits is 8", "Weight type int8 not supported"),
    (AWQ, "config", {"group_size": 32}, "group_size is 32", "Group size 32 not supported"),
    (AWQ, "config", {"zero_point": False}, "zero_point is False", "with zero points"),
    (OPT, "config", {"quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'", "NVFP4"),
    (OPT, "config", {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'", "NVFP4"),
    (OPT, "config", {"quant_algo": "fp8_pb_wo"}, "quant_algo is 'fp8_pb_wo'", "NVFP4"),
    # As hf_quant_config.json has it.
    (OPT, "config", {"quantization": {"quant_algo": "MXFP8"}}, "quant_algo is 'MXFP8'", "NVFP4"),
    (OPT, "config", PLAIN, "quantized_layers['b'].quant_algo is 'NVFP4'", "NVFP4"),
    (OPT, "config", LONG, "quantized_layers['a.experts'].group_size is 64", "NVFP4"),
]


@pytest.mark.parametrize(("recipe", "place", "fields", "named", "reason"), REFUSALS)
def test_a_refusal_names_the_field_and_the_reason(
    recipe: Recipe, place: str, fields: dict[str, Any], named: str, reason: str
) -> None:
    config = quantization_config(recipe)
    group = config.get("config_groups", {}).get("group_0", {})
    {"config": config, "group": group, "weights": group.get("weights")}[place].update(fields)
    with pytest.raises(UnsupportedModelError) as caught:
        check(config)
    text = str(caught.value)
    assert text.startswith(f"quantization_config.{named if place == 'config' else ''}")
    assert named in text
    assert reason in text
    assert fields is HEADS or "bfloat16 copy" in text


def test_orders_rules_and_experts_that_can_be_served_are_taken() -> None:
    channel = quantization_config(Recipe(format="gptq", bits=8, group_size=CHANNEL))
    # With one scale per channel there are no groups to be out of order.
    check(channel | {"desc_act": True})
    check(channel | {"dynamic": {"-:.*lm_head.*": {}, "+:.*": {"bits": 4}}})
    config = quantization_config(INT4)
    config["config_groups"]["group_0"]["weights"]["actorder"] = "static"
    check(config)
    for algorithm in ("NVFP4", "w4a16_nvfp4"):
        expert = {"quant_algo": algorithm, "group_size": 16}
        layers = {"model.layers.0.mlp.experts.0.up_proj": expert}
        check(quantization_config(OPT) | MIXED | {"quantized_layers": layers})


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


# -------------------------------------------------------------------------------------- byte linear
FP8 = ByteWeights(is_float=True, scope="channel")


@pytest.mark.parametrize(
    ("stored", "block"),
    [
        (FP8, (1, 0)),
        (ByteWeights(is_float=False, scope="channel"), (1, 0)),
        (ByteWeights(is_float=True, scope="block", block=(16, 128)), (16, 128)),
        (ByteWeights(is_float=False, scope="block", block=(24, 192)), (24, 192)),
    ],
    ids=str,
)
def test_memory_is_packed_where_it_lies(stored: ByteWeights, block: tuple[int, int]) -> None:
    # The last block of 320 inputs is cut, and of 48 rows.
    make = floats if stored.is_float else integers
    meant, tensors = make(torch.randn(48, 320), block, "weight_scale")
    weight = tensors["weight"]
    words = stored.pack_words(weight)
    scales = stored.pack_scales(tensors["weight_scale"], [48], 320)
    assert words.data_ptr() == weight.data_ptr()
    written = stored.weights(320).format
    assert torch.equal(dequantize(words, scales, None, 48, written), meant)


def test_parts_without_a_scale_have_the_first_one() -> None:
    stored = ByteWeights(is_float=True, scope="tensor")
    scales = stored.pack_scales(torch.tensor([0.5, math.nan]), [16, 32], 64)
    assert torch.equal(scales, torch.full((3, 1, 16), 0.5))


def test_a_weight_that_is_not_quantised_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("rank", 0), ("world_size", 1)):
        place = f"vllm.model_executor.parameter.get_tensor_model_parallel_{name}"
        monkeypatch.setattr(place, lambda value=value: value)
    layer = nn.Module()
    with set_current_vllm_config(VllmConfig()):
        scheme = RblnByteScheme(FP8, "layers.0.mlp.gate")
        scheme.create_weights(layer, 64, 16, [16], 64, torch.bfloat16, lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"layers.0.mlp.gate: .* no weight_scale"):
        scheme.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("stored", "depth", "reason"),
    [
        (FP8, 66, "66 inputs do not fill words of 4"),
        (ByteWeights(is_float=True, scope="block", block=(128, 128)), 160, "160 inputs end within"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(stored: ByteWeights, depth: int, reason: str) -> None:
    with set_current_vllm_config(VllmConfig()):
        scheme = RblnByteScheme(stored, "layers.0.down_proj")
        with pytest.raises(UnsupportedModelError, match=reason):
            scheme.create_weights(
                nn.Module(), depth, 16, [16], depth, torch.bfloat16, lambda *_: None
            )


def test_activations_that_are_not_quantised_are_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quantized_linear._tell.cache_clear()
    stored = ByteWeights(is_float=True, scope="channel", published="FP8 W8A8")
    with caplog.at_level(logging.WARNING), set_current_vllm_config(VllmConfig()):
        for name in ("q_proj", "o_proj"):
            RblnByteScheme(stored, name)
    warnings = [record.message for record in caplog.records if "published as" in record.message]
    assert warnings == [
        "the checkpoint is published as FP8 W8A8: its weights are used, activations are not "
        "quantised"
    ]
