"""Attention over a paged KV cache in float32, which every attention op here is made of.

q [B, H, G, L, D]; k and v [B, H, 1, L, D]; kv_cache [N, 2, H, 1, S, D], or the bytes of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from rebel.ops.library import describe, has_sorted_rows
from rebel.rules import is_on, require
from rebel.settings import SETTINGS
from torch import Tensor

_SMALLEST_BLOCK, _LARGEST_BLOCK = 512, 16384
# Of the ops, as vllm_rbln/v1/worker/dynamic_kv_sizer.py has it.
_LARGEST_BLOCK_ID = 2**15 - 1


class PagedCache(Protocol):
    """Blocks that tokens are written to and read from."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def width(self) -> int:
        """Of a value."""
        ...

    def write(self, blocks: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, H, D] at T places."""
        ...

    def read(self, blocks: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [T, H, D] of T places, in float32."""
        ...


@dataclass(frozen=True)
class Cache:
    """A KV cache with what is needed to read and write floats in it."""

    values: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0

    @staticmethod
    def of(
        kv_cache: Tensor, dtype: torch.dtype | None, k_scale: Tensor | None, v_scale: Tensor | None
    ) -> Cache:
        """``dtype`` is what the bytes of an fp8 cache stand for; None for a plain cache.

        With ``cache_dtype`` broken it is e4m3 for any.
        """
        if dtype is None:
            return Cache(kv_cache)
        if "cache_dtype" in SETTINGS.broken:
            dtype = torch.float8_e4m3fn
        assert k_scale is not None
        assert v_scale is not None
        return Cache(kv_cache.view(dtype), float(k_scale), float(v_scale))

    @property
    def block_size(self) -> int:
        return self.values.shape[-2]

    @property
    def width(self) -> int:
        """Of a value."""
        return self.values.shape[-1]

    def write(self, blocks: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, H, D] at T places."""
        dtype = self.values.dtype
        self.values[blocks, 0, :, 0, slots] = (k.float() / self.k_scale).to(dtype)
        self.values[blocks, 1, :, 0, slots] = (v.float() / self.v_scale).to(dtype)

    def read(self, blocks: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [T, H, D] of T places, in float32."""
        k, v = self.values[blocks, 0, :, 0, slots], self.values[blocks, 1, :, 0, slots]
        return k.float() * self.k_scale, v.float() * self.v_scale


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, visible: Tensor, sinks: Tensor | None
) -> Tensor:
    """Softmax attention of one request: q [H, G, L, D], k and v [T, H, D], visible [L, T] or more.

    Returns float32 [H, G, L, D]. ``sinks`` is one more logit per query head.
    """
    scores = torch.einsum("hgld,thd->hglt", q.float(), k) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        extra = sinks.float().reshape(*q.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, extra], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hglt,thd->hgld", weights.nan_to_num(), v)


def run_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: PagedCache,
    scale: Tensor,
    seq_idx: Tensor,
    tables: Tensor,
    *,
    sinks: Tensor | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Write the L new tokens of each request from position ``seq_idx`` on, then attend.

    A token sees positions up to its own, the last ``window`` of them if there is one; with ``mask``
    [B or 1, 1, 1, L, C] it sees what that says instead. A chunk's positions beyond the table are
    dropped; a decode step has none (rule ``positions``).

    The result has the strides of ``q``: vllm_rbln views it as tokens where B and L are above 1.
    """
    size, rows = cache.block_size, tables.reshape(q.shape[0], -1).long()
    # As wide as the values, which latent attention has within the keys.
    out = torch.empty_like(q[..., : cache.width])
    if tables.dim() == 2:
        last = int(seq_idx.max()) + q.shape[3]
        room = rows.shape[1] * size
        require("positions", last <= room, f"a decode step ends at {last}, its table at {room}")
    reached = _rows_read(q, seq_idx, tables, size)
    for row in range(q.shape[0]):
        start, length = int(seq_idx[row].sum()), q.shape[3]
        end = min(start + length, rows.shape[1] * size)
        if "draft_rows" in SETTINGS.broken and tables.dim() == 2:
            end = start + 1
        new = torch.arange(start, end)
        cache.write(
            rows[row][new // size],
            new % size,
            *(x[row, :, 0, : end - start].transpose(0, 1) for x in (k, v)),
        )
        seen = torch.arange(0 if window is None else max(0, start - window + 1), end)
        keys, values = cache.read(rows[row][seen // size], seen % size)
        queries = start + torch.arange(length)[:, None]
        if mask is None:
            visible = seen <= queries
            visible &= seen > queries - (window or end + length)
            visible &= row < reached[seen // size]
        else:
            visible = mask[min(row, mask.shape[0] - 1), 0, 0, :, seen] > 0
        out[row] = attend(q[row], keys, values, scale, visible, sinks).to(q.dtype)
    return out


def _rows_read(q: Tensor, seq_idx: Tensor, tables: Tensor, size: int) -> Tensor:
    """Of each block column [P], how many rows of the batch the kernel reads (rule ``rows``).

    vllm_rbln/v1/worker/rbln_model_runner.py, ``sort_batch_by_length``: as many as have tokens
    there, the L of this step included, so that batches are sorted by length. Release 0.12.1 is
    told so, and other orders raise.
    """
    batch, length, columns = q.shape[0], q.shape[3], tables.shape[-1]
    if batch == 1 or not has_sorted_rows() or not is_on("rows"):
        return torch.full((columns,), batch)
    if SETTINGS.is_next:
        starts = seq_idx.reshape(-1).tolist()
        kept = starts == sorted(starts, reverse=True)
        require("rows", kept, f"is_prompt_sorted, but the rows begin at {starts}")
    firsts = torch.arange(columns) * size
    return (seq_idx.reshape(batch, 1) + length > firsts).sum(dim=0)


def check_paged(
    q: Tensor, kv_cache: Tensor, seq_idx: Tensor, tables: Tensor, *, is_prefill: bool | None
) -> None:
    """The forms of 0.12 (rules ``schema`` and ``blocks``); None where one op has both phases."""
    batch, length, block = q.shape[0], q.shape[3], kv_cache.shape[-2]
    require(
        "schema",
        seq_idx.dtype == torch.int64 and list(seq_idx.shape) == [batch, 1],
        f"seq_idx is {describe(seq_idx)}, not int64[{batch}, 1]",
    )
    ranks = (1, 2) if is_prefill is None else (1,) if is_prefill else (2,)
    require(
        "schema",
        tables.dtype == torch.int32 and tables.dim() in ranks,
        f"block_tables is {describe(tables)}: int32[P] in prefill, int32[B, P] in decode",
    )
    power = block & (block - 1) == 0 and _SMALLEST_BLOCK <= block <= _LARGEST_BLOCK
    require("blocks", power, f"the block size is {block}")
    count = kv_cache.shape[0]
    require("blocks", count <= _LARGEST_BLOCK_ID, f"{count} blocks are more than 16 bits number")
    fits = tables.dim() == 2 or block % length == 0
    require("blocks", fits, f"a chunk of {length} does not divide block {block}")
