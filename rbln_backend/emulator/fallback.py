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


def flash_causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    scale: Tensor,
    seq_idx: Tensor,
    block_tables: Tensor,
    slot_mapping: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [B, Hkv, G, L, D] over the paged cache, request by request."""
    batch, kv_heads, group, length, head_size = q.shape
    out = q.new_empty(batch, length, kv_heads, group, head_size)
    starts = seq_idx.reshape(batch, -1).sum(dim=-1).tolist()
    sink = None if sinks is None else sinks.float().reshape(kv_heads, group, 1, 1)
    for b, table in enumerate(block_tables.reshape(batch, -1).long()):
        start = int(starts[b])
        _write(kv_cache, table, start, k[b, :, 0], v[b, :, 0])
        rows = _attend(q[b], kv_cache, table, start, float(scale), sink)
        out[b] = rows.permute(2, 0, 1, 3)
    return out.permute(0, 2, 3, 1, 4)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    seq_idx: Tensor,
    scale: Tensor,
    block_tables: Tensor,
    dummy: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """The one-block ops: ``flash_causal_attention`` with another argument order."""
    return flash_causal_attention(q, k, v, kv_cache, scale, seq_idx, block_tables, dummy, sinks)


def _write(kv_cache: Tensor, table: Tensor, start: int, k: Tensor, v: Tensor) -> None:
    block_size = kv_cache.shape[4]
    positions = torch.arange(start, min(start + k.shape[1], table.numel() * block_size))
    blocks, slots = table[positions // block_size], positions % block_size
    for index, new in enumerate((k, v)):
        kv_cache[blocks, index, :, 0, slots] = new[:, : positions.numel()].transpose(0, 1)


def _attend(
    q: Tensor, kv_cache: Tensor, table: Tensor, start: int, scale: float, sink: Tensor | None
) -> Tensor:
    block_size, length = kv_cache.shape[4], q.shape[2]
    count = min(start + length, table.numel() * block_size)
    blocks = table[: -(-count // block_size)]
    # [P, 2, Hkv, S, D] -> [2, Hkv, 1, count, D]
    cached = kv_cache[blocks, :, :, 0].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, None, :count]
    keys, values = cached.float()
    seen = torch.arange(count) <= torch.arange(start, start + length)[:, None]
    scores = (q.float() @ keys.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :count]
    # What lies beyond a row's position may be NaN, which times zero would not vanish.
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    attended: Tensor = weights @ finite
    return attended.to(q.dtype)


BODIES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "rbln_emulator": {
        "pack_linear_weight": pack_linear_weight,
        "linear": linear,
        "rms_norm": rms_norm,
        "fused_add_rms_norm": fused_add_rms_norm,
        "silu_and_mul": silu_and_mul,
        "rotary_embedding": rotary_embedding,
    },
    "rbln_custom_ops": {
        "flash_causal_attention_naive_prefill": flash_causal_attention,
        "flash_causal_attention_naive_decode": flash_causal_attention,
        "causal_attention_naive_prefill": causal_attention,
        "causal_attention_naive_decode": causal_attention,
    },
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
