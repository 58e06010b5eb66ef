"""vLLM layers whose forward calls the emulator's kernels when traced.

vLLM replaces a layer class by one registered under its name; the replacements differ from the
originals in ``forward_native`` only, so weights, loading and configuration stay upstream's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rbln_backend.vllm_compat.surface import (
    CustomOp,
    Llama3RotaryEmbedding,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
)


class EmulatedRMSNorm(RMSNorm):
    """RMSNorm over the last dimension, with or without the residual addition."""

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if self.variance_size_override is not None or not self.has_weight:
            return super().forward_native(x, residual)
        ops, epsilon = torch.ops.rbln_emulator, self.variance_epsilon
        if residual is None:
            normed: Tensor = ops.rms_norm(x, self.weight, epsilon)
            return normed
        pair: tuple[Tensor, Tensor] = ops.fused_add_rms_norm(x, residual, self.weight, epsilon)
        return pair


class EmulatedSiluAndMul(SiluAndMul):
    """silu(x[..., :d]) * x[..., d:]."""

    @staticmethod
    def forward_native(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.rbln_emulator.silu_and_mul(x)
        return result


def _rotate(
    layer: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if key is None or layer.cos_sin_cache.dtype != query.dtype:
        return RotaryEmbedding.forward_native(layer, positions, query, key)
    pair: tuple[Tensor, Tensor] = torch.ops.rbln_emulator.rotary_embedding(
        positions, query, key, layer.cos_sin_cache, layer.head_size, layer.is_neox_style
    )
    return pair


class EmulatedRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding of query [T, Hq*D] and key [T, Hkv*D]."""

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return _rotate(self, positions, query, key)


class EmulatedLlama3RotaryEmbedding(Llama3RotaryEmbedding):
    """As above over Llama 3's scaled frequencies."""

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return _rotate(self, positions, query, key)


_REPLACEMENTS: dict[str, type[CustomOp]] = {
    "RMSNorm": EmulatedRMSNorm,
    "SiluAndMul": EmulatedSiluAndMul,
    "RotaryEmbedding": EmulatedRotaryEmbedding,
    "Llama3RotaryEmbedding": EmulatedLlama3RotaryEmbedding,
}


def install_layers() -> None:
    """Register the replacements with vLLM; idempotent, once per process."""
    for name, layer in _REPLACEMENTS.items():
        if layer.__dict__.get("name") is None:
            CustomOp.register_oot(name=name)(layer)
