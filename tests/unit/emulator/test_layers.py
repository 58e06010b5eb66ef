"""Layers that call the kernels compute what vLLM's own layers of that name compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import (
    LinearScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import (
    YaRNScalingRotaryEmbedding,
)

from rbln_backend.devices.emulated.layers import install_layers
from tests.unit.emulator.cases import DTYPES, assert_near


@pytest.fixture(autouse=True)
def vllm_config() -> Iterator[None]:
    install_layers()
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma_norm(dtype: torch.dtype) -> None:
    layer = GemmaRMSNorm(48).to(dtype)
    torch.nn.init.normal_(layer.weight)
    x, residual = (torch.randn(5, 48).to(dtype) for _ in range(2))
    assert type(layer) is not GemmaRMSNorm
    assert_near(layer(x), GemmaRMSNorm.forward_native(layer, x).double())
    normed, total = layer(x, residual)
    expected, expected_total = GemmaRMSNorm.forward_native(layer, x, residual)
    assert_near(normed, expected.double())
    assert torch.equal(total, expected_total)


def rotaries(dtype: torch.dtype) -> list[RotaryEmbedding]:
    sizes = {"head_size": 32, "rotary_dim": 24, "base": 10000.0, "is_neox_style": True}
    return [
        LinearScalingRotaryEmbedding(
            **sizes, max_position_embeddings=64, scaling_factors=4.0, dtype=dtype
        ),
        YaRNScalingRotaryEmbedding(
            **sizes, max_position_embeddings=64, scaling_factor=4.0, dtype=dtype
        ),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_rotaries(dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 63, 200])
    query, key = torch.randn(4, 96).to(dtype), torch.randn(4, 64).to(dtype)
    for layer in rotaries(dtype):
        assert type(layer).__name__.startswith("Emulated")
        actual = layer(positions, query, key)
        # Upstream's own, over the same table in double precision.
        expected = RotaryEmbedding.forward_native(
            layer.double(), positions, query.double(), key.double()
        )
        for turned, wanted in zip(actual, expected, strict=True):
            assert_near(turned, wanted)
