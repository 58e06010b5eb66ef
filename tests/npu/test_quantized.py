"""Quantised weights that the SDK's forms do not have are refused on an NPU, by name."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.scalar_type import scalar_types

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.quantization.byte_linear import ByteWeights, RblnByteScheme
from rbln_backend.quantization.linear import RblnWna16LinearKernel


def make_bytes() -> RblnByteScheme:
    return RblnByteScheme(ByteWeights(is_float=True, scope="channel"), "layers.0.o_proj")


def make_words(*, zeros: bool = True) -> RblnWna16LinearKernel:
    config = MPLinearLayerConfig(
        full_weight_shape=(128, 64),
        partition_weight_shape=(128, 64),
        weight_type=scalar_types.uint4 if zeros else scalar_types.uint4b8,
        act_type=torch.bfloat16,
        group_size=64,
        zero_points=zeros,
    )
    return RblnWna16LinearKernel(config, "qweight", "scales", "qzeros")


def on(device: str) -> VllmConfig:
    return VllmConfig(additional_config={"rbln": {"device": device}})


@pytest.mark.parametrize("make", [make_bytes, make_words])
def test_other_formats_than_the_sdk_s_are_refused(
    sdk: ModuleType, make: Callable[[], object]
) -> None:
    assert sdk
    with (
        set_current_vllm_config(on("rebel")),
        pytest.raises(UnsupportedModelError, match=r"on an NPU: .* run it on the emulated device"),
    ):
        make()
    with set_current_vllm_config(on("emulated")):
        make()


def test_symmetric_words_are_taken(sdk: ModuleType) -> None:
    assert sdk
    with set_current_vllm_config(on("rebel")):
        assert make_words(zeros=False).weights.symmetric
