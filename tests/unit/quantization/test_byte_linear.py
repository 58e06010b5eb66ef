"""Weights of a byte each: packed where they lie, scales spread, and a missing one reported."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config

from rbln_backend.devices.emulated.kernel_set import load_kernels
from rbln_backend.devices.emulated.packing import dequantize
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.layers import quantized_linear
from rbln_backend.layers.quantized_linear import ByteWeights, RblnByteScheme
from tests.kernel_cache import share_kernels
from tests.quantized_tensors import floats, integers

FP8 = ByteWeights(is_float=True, scope="channel")


@pytest.fixture(autouse=True)
def native_kernels(tmp_path: Path) -> None:
    load_kernels(share_kernels(tmp_path / "kernels"), "native")


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
