"""Sliding windows: the op of CR13, which appends to several blocks, and the one that shifts one."""

from __future__ import annotations

import torch
from rebel.ops.attention import _QKV
from rebel.ops.library import CUSTOM, SORTED, define, describe
from rebel.ops.paged import Cache, attend, check_paged, run_paged
from rebel.rules import require
from torch import Tensor

_APPEND = (
    _QKV + "Tensor seq_idx, Tensor scale, Tensor block_tables, int window_size, bool is_causal, "
    "Tensor? attn_mask, Tensor? sinks"
)
_SHIFT = (
    _QKV + "Tensor cache_seq_len, Tensor cache_offset, Tensor scale, Tensor block_tables, "
    "Tensor dummy, "
)


def append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    seq_idx: Tensor,
    scale: Tensor,
    tables: Tensor,
    window_size: int,
    is_causal: bool,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``sliding_window_attention_v1``, one op for prefill and decode."""
    check_paged(q, kv_cache, seq_idx, tables, is_prefill=None)
    return run_paged(
        q, k, v, Cache(kv_cache), scale, seq_idx, tables, sinks=sinks, window=window_size
    )


def _fake_append(
    q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, seq_idx: Tensor, *rest: object
) -> Tensor:
    tables = rest[1]
    assert isinstance(tables, Tensor)
    check_paged(q, kv_cache, seq_idx, tables, is_prefill=None)
    require("schema", rest[3] is True and rest[4] is None, "v1 is causal, and without a mask")
    return torch.empty_like(q)


def shift(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    cache_seq_len: Tensor,
    cache_offset: Tensor,
    scale: Tensor,
    tables: Tensor,
    dummy: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """``sliding_window_attention_naive_*``: a request has one block, whose slots are the window.

    Its first ``cache_seq_len`` slots are the latest tokens; ``cache_offset - cache_seq_len`` of the
    L rows are real. Afterwards the block holds the latest tokens again, from slot 0 on.
    """
    window, blocks = kv_cache.shape[-2], tables.reshape(-1).long()
    out = torch.zeros_like(q)
    for row, block in enumerate(blocks.tolist()):
        old = int(cache_seq_len.reshape(-1)[row])
        real = int(cache_offset.reshape(-1)[row]) - old
        keys, values = (
            torch.cat([kv_cache[block, part, :, 0, :old], x[row, :, 0, :real]], dim=1)
            for part, x in ((0, k), (1, v))
        )
        query, seen = old + torch.arange(real)[:, None], torch.arange(old + real)
        visible = (seen <= query) & (seen > query - window)
        k_seen, v_seen = keys.transpose(0, 1).float(), values.transpose(0, 1).float()
        found = attend(q[row, :, :, :real], k_seen, v_seen, scale, visible, sinks)
        out[row, :, :, :real] = found.to(q.dtype)
        kept = min(window, old + real)
        kv_cache[block, 0, :, 0, :kept] = keys[:, keys.shape[1] - kept :]
        kv_cache[block, 1, :, 0, :kept] = values[:, values.shape[1] - kept :]
    return out


def _shift_decode(*arguments: object) -> Tensor:
    """The decode op has a mask before the sinks; it says what ``cache_seq_len`` says."""
    return shift(*arguments[:9], *arguments[10:])  # type: ignore[arg-type]


def _fake_shift(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    cache_seq_len: Tensor,
    cache_offset: Tensor,
    *rest: object,
) -> Tensor:
    for name, lengths in (("cache_seq_len", cache_seq_len), ("cache_offset", cache_offset)):
        require("schema", list(lengths.shape) == [q.shape[0], 1], f"{name} is {describe(lengths)}")
    return torch.empty_like(q)


define(CUSTOM, "sliding_window_attention_v1", _APPEND, append, _fake_append, later=SORTED)
define(
    CUSTOM,
    "sliding_window_attention_naive_prefill",
    _SHIFT + "Tensor? sinks",
    shift,
    _fake_shift,
    later=SORTED,
)
define(
    CUSTOM,
    "sliding_window_attention_naive_decode",
    _SHIFT + "Tensor? attn_mask, Tensor? sinks",
    _shift_decode,
    _fake_shift,
    later=SORTED,
)
