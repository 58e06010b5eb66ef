"""Latent attention (MLA) over a paged cache [N, S, 576]: 512 numbers of values, 64 rotated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rebel.ops.library import CUSTOM, SORTED, define, describe
from rebel.ops.paged import check_paged, run_paged
from rebel.rules import require
from torch import Tensor

_ARGUMENTS = (
    "Tensor q, Tensor kv_c_normed, Tensor k_pe, Tensor(a!) kv_cache, Tensor seq_idx,"
    " Tensor block_tables, Tensor scale"
)
_VALUES, _HEAD = 512, 576


@dataclass(frozen=True)
class LatentCache:
    """A cache whose keys begin with the values."""

    values: Tensor

    @property
    def block_size(self) -> int:
        return self.values.shape[1]

    @property
    def width(self) -> int:
        """Of a value."""
        return _VALUES

    def write(self, blocks: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k`` [T, 1, 64] behind ``v`` [T, 1, 512] at T places."""
        self.values[blocks, slots] = torch.cat([v, k], dim=-1)[:, 0].to(self.values.dtype)

    def read(self, blocks: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [T, 1, 576] and values [T, 1, 512] of T places, in float32."""
        keys = self.values[blocks, slots].float()[:, None]
        return keys, keys[..., :_VALUES]


def _latent(
    q: Tensor,
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    seq_idx: Tensor,
    tables: Tensor,
    scale: Tensor,
    *,
    is_prefill: bool,
) -> Tensor:
    """q [B, H, L, 576], kv_c_normed [B, L, 512], k_pe [B, L, 64] to [B, H, L, 512]."""
    batch, _, length, head = q.shape
    sizes = [list(kv_c_normed.shape), list(k_pe.shape), kv_cache.dim(), head]
    wanted = [[batch, length, _VALUES], [batch, length, _HEAD - _VALUES], 3, _HEAD]
    shown = ", ".join(map(describe, (q, kv_c_normed, k_pe, kv_cache)))
    require("schema", sizes == wanted, f"latent attention of {shown}")
    queries = q.unsqueeze(1)
    check_paged(queries, kv_cache, seq_idx, tables, is_prefill=is_prefill)
    new = (x[:, None, None] for x in (k_pe, kv_c_normed))
    out = run_paged(queries, *new, LatentCache(kv_cache), scale, seq_idx, tables)
    return out.squeeze(1).contiguous()


def _prefill(*given: Tensor) -> Tensor:
    return _latent(*given, is_prefill=True)


def _decode(*given: Tensor) -> Tensor:
    return _latent(*given, is_prefill=False)


def _fake(q: Tensor, kv_c_normed: Tensor, *rest: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:-1], kv_c_normed.shape[-1]))


for _phase, _body in (("prefill", _prefill), ("decode", _decode)):
    define(CUSTOM, f"paged_flash_causal_mla_naive_{_phase}", _ARGUMENTS, _body, _fake, later=SORTED)
