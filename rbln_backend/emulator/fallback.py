"""PyTorch bodies of every kernel op, for hosts where the C++ library cannot be built or loaded.

They compute the same values to rounding, but ATen's own kernels decide the summation order, so
results may depend on the batch size. ``linear`` unpacks its weight at every call: a compiler that
knows it runs on these bodies leaves linears alone instead of packing them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rbln_backend.emulator import fallback_attention
from rbln_backend.emulator.fallback_moe import moe, moe_route
from rbln_backend.emulator.packing import pack_reference, unpack


def pack_linear_weight(weight: Tensor) -> Tensor:
    return pack_reference(weight)


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return functional.linear(x, unpack(packed, out_features, x.shape[-1]), bias).contiguous()


def _normalise(total: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    scaled = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    return (scaled.to(weight.dtype) * weight).to(dtype).contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normalise(x.float(), weight, eps, x.dtype)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = (x.float() + residual.float()).contiguous()
    new_residual = total.to(x.dtype, copy=True)
    return _normalise(total, weight, eps, x.dtype), new_residual


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype).contiguous()


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, head_size: int, is_neox: bool
) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin_cache[positions.flatten().long()].float().chunk(2, dim=-1)
    tables = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate(q, *tables, head_size, is_neox), _rotate(k, *tables, head_size, is_neox)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, head_size: int, is_neox: bool) -> Tensor:
    heads = x.reshape(cos.shape[0], -1, head_size).float()
    rotary_dim = 2 * cos.shape[-1]
    turning, kept = heads[..., :rotary_dim], heads[..., rotary_dim:]
    if is_neox:
        first, second = turning.chunk(2, dim=-1)
    else:
        first, second = turning[..., ::2], turning[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(turned, dim=-1) if is_neox else torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat((joined, kept), dim=-1).to(x.dtype).reshape(x.shape).contiguous()


BODIES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "rbln_emulator": {
        "pack_linear_weight": pack_linear_weight,
        "linear": linear,
        "rms_norm": rms_norm,
        "fused_add_rms_norm": fused_add_rms_norm,
        "silu_and_mul": silu_and_mul,
        "rotary_embedding": rotary_embedding,
        "moe_route": moe_route,
        "moe": moe,
    },
    "rbln_custom_ops": fallback_attention.BODIES,
}


def register() -> list[torch.library.Library]:
    """Make these bodies the CPU implementation for as long as the returned libraries live."""
    libraries = []
    with warnings.catch_warnings():
        # Said when the C++ bodies were active before, which is what the caller asked to change.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for namespace, bodies in BODIES.items():
            library = torch.library.Library(namespace, "IMPL")
            for name, body in bodies.items():
                library.impl(name, body, "CPU")
            libraries.append(library)
    return libraries
