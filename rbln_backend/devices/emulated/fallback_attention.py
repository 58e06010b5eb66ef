"""PyTorch bodies of the attention ops; ``layers.attention_ops`` says what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Softmax:
    """Options that turn q . k into weights, besides the mask."""

    scale: float
    sinks: Tensor | None
    """[Hkv, G, 1, 1] float32."""
    soft_cap: float | None
    slopes: Tensor | None
    """As sinks."""

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, distance: Tensor, seen: Tensor
    ) -> Tensor:
        """Attend in one batch row: own q [Hkv, G, L, D]."""
        scores = q.float() @ keys.float().transpose(-1, -2) * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        if self.slopes is not None:
            scores = scores - self.slopes * distance
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
        # What a row does not see may be NaN, which times zero would not vanish.
        attended: Tensor = weights @ values.float().nan_to_num(0.0, 0.0, 0.0)
        return attended.to(q.dtype)


def _softmax(
    q: Tensor,
    scale: Tensor,
    sinks: Tensor | None,
    soft_cap: float | None,
    slopes: Tensor | None,
) -> _Softmax:
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"logits_soft_cap is {soft_cap}; it must be positive")
    return _Softmax(float(scale), _by_head(q, sinks), soft_cap, _by_head(q, slopes))


def _by_head(q: Tensor, numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.float().reshape(*q.shape[1:3], 1, 1)


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
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    attention_chunk: int | None = None,
    attention_window: int | None = None,
    query_counts: Tensor | None = None,
) -> Tensor:
    """Write k, v [B, Hkv, 1, L, D] to the cache, then attend with q [B, Hkv, G, L, D]."""
    options: Any = (sinks, logits_soft_cap, alibi_slopes, k_scale, v_scale)
    bounds: Any = (attention_chunk, attention_window)
    if query_counts is not None:

        def attend(row: int, *own: Tensor) -> Tensor:
            table = _table_of(block_tables, query_counts, row)
            rest = (kv_cache, scale, seq_idx[row], table, slot_mapping, *options, *bounds)
            given: Any = (*own, *rest)
            return flash_causal_attention(*given)

        return _each_request(query_counts, attend, q, k, v)
    batch = q.shape[0]
    for b, table in enumerate(block_tables.reshape(batch, -1).long()):
        new = _stored(k[b, :, 0], k_scale), _stored(v[b, :, 0], v_scale)
        _write_pages(kv_cache, table, int(seq_idx.reshape(batch)[b]), *new)
    required = (q, kv_cache, scale, seq_idx, block_tables)
    return shared_attention(*required, *options, *bounds, value_size=v.shape[-1])


def shared_attention(
    q: Tensor,
    kv_cache: Tensor,
    scale: Tensor,
    seq_idx: Tensor,
    block_tables: Tensor,
    sinks: Tensor | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    attention_chunk: int | None = None,
    attention_window: int | None = None,
    query_counts: Tensor | None = None,
    *,
    value_size: int | None = None,
) -> Tensor:
    """q [B, Hkv, G, L, D] over the paged cache, request by request."""
    if query_counts is not None:

        def attend(row: int, own: Tensor) -> Tensor:
            place = (seq_idx[row], _table_of(block_tables, query_counts, row))
            options = (sinks, logits_soft_cap, alibi_slopes, k_scale, v_scale)
            bounds = (attention_chunk, attention_window)
            given: Any = (own, kv_cache, scale, *place, *options, *bounds)
            return shared_attention(*given)

        return _each_request(query_counts, attend, q)
    batch, kv_heads, group, length, head_size = q.shape
    value_size = value_size or head_size
    out = q.new_empty(batch, length, kv_heads, group, value_size)
    starts = seq_idx.reshape(batch).tolist()
    softmax = _softmax(q, scale, sinks, logits_soft_cap, alibi_slopes)
    for b, table in enumerate(block_tables.reshape(batch, -1).long()):
        start = int(starts[b])
        keys, values = _read_pages(kv_cache, table, start + length)
        key, row = torch.arange(keys.shape[2]), torch.arange(start, start + length)[:, None]
        seen = key <= row
        if attention_chunk is not None:
            seen &= key >= row // attention_chunk * attention_chunk
        if attention_window is not None:
            seen &= key > row - attention_window
        keys, values = _seen(keys, k_scale), _seen(values[..., :value_size], v_scale)
        attended = softmax.attend(q[b], keys, values, row - key, seen)
        out[b] = attended.permute(2, 0, 1, 3)
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
    *options: Any,
    **named: Any,
) -> Tensor:
    """The one-block ops: ``flash_causal_attention``, q [B, Hkv, G, L, D], reordered arguments."""
    required = (q, k, v, kv_cache, scale, seq_idx, block_tables, dummy)
    return flash_causal_attention(*required, *options, **named)


def latent_attention(
    q: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    scale: Tensor,
    seq_idx: Tensor,
    block_tables: Tensor,
    batch: int,
    query_counts: Tensor | None = None,
) -> Tensor:
    """q [T, H, C + R], kv_c [T, C], k_pe [T, R] to [T, H, C]; writes one cache row per token."""
    heads = q.shape[1]
    rows = torch.cat((kv_c, k_pe), dim=-1).view(batch, 1, 1, -1, q.shape[2])
    queries = q.view(batch, -1, 1, heads, q.shape[2]).permute(0, 2, 3, 1, 4)
    out = flash_causal_attention(
        *(queries, rows, rows[..., : kv_c.shape[-1]]),
        *(kv_cache.expand(-1, 2, -1, -1, -1, -1), scale, seq_idx, block_tables, scale),
        query_counts=query_counts,
    )
    return out.permute(0, 3, 1, 2, 4).reshape(q.shape[0], heads, -1)


def _each_request(
    counts: Tensor, attend: Callable[..., Tensor], q: Tensor, *others: Tensor
) -> Tensor:
    """``attend(r, *rows)`` over the rows of each request r, zeros after the last.

    q, and k and v, if they are given: [1, Hkv, G or 1, L, D]. Values may be narrower than keys.
    """
    width = (others or (q,))[-1].shape[-1]
    out = q.new_zeros(*q.shape[:-1], width)
    first = 0
    for row, count in enumerate(counts.tolist()):
        if count:
            rows = slice(first, first + count)
            out[..., rows, :] = attend(row, *(x[..., rows, :] for x in (q, *others)))
        first += count
    # As the other bodies lay it out.
    return out.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)


def _table_of(block_tables: Tensor, counts: Tensor, row: int) -> Tensor:
    """The blocks of one of several requests."""
    return block_tables.reshape(counts.numel(), -1)[row]


def _stored(rows: Tensor, scale: Tensor | None) -> Tensor:
    """New keys or values as the cache keeps them; ``scale`` is that of a cache of e4m3."""
    if scale is None:
        return rows
    return (rows.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _seen(rows: Tensor, scale: Tensor | None) -> Tensor:
    """Return the cached keys and values as tokens read them."""
    return rows if scale is None else rows.float() * scale


def _write_pages(kv_cache: Tensor, table: Tensor, start: int, k: Tensor, v: Tensor) -> None:
    block_size = kv_cache.shape[4]
    positions = torch.arange(start, min(start + k.shape[1], table.numel() * block_size))
    blocks, slots = table[positions // block_size], positions % block_size
    for index, new in enumerate((k, v)):
        rows = new[:, : positions.numel()].transpose(0, 1)
        kv_cache[:, index][blocks, :, 0, slots, : new.shape[-1]] = rows


def _read_pages(kv_cache: Tensor, table: Tensor, end: int) -> Tensor:
    """The keys and values of the first ``end`` positions that the table has: [2, Hkv, 1, N, D]."""
    block_size = kv_cache.shape[4]
    count = min(end, table.numel() * block_size)
    pages = kv_cache[table[: -(-count // block_size)], :, :, 0]
    return pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, None, :count]


def sliding_window_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    cache_seq_len: Tensor,
    cache_offset: Tensor,
    scale: Tensor,
    block_tables: Tensor,
    dummy: Tensor,
    sinks: Tensor | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    query_counts: Tensor | None = None,
) -> Tensor:
    """q [B, Hkv, G, L, D] over each request's window block and the new tokens."""
    if query_counts is not None:

        def attend(row: int, *own: Tensor) -> Tensor:
            place = (cache_seq_len[row], cache_offset[row], scale, block_tables.reshape(-1)[row])
            options = (sinks, logits_soft_cap, alibi_slopes, k_scale, v_scale)
            given: Any = (*own, kv_cache, *place, dummy, *options)
            return sliding_window_prefill(*given)

        return _each_request(query_counts, attend, q, k, v)
    batch, kv_heads, group, length, head_size = q.shape
    window, value_size = kv_cache.shape[4], v.shape[-1]
    out = q.new_zeros(batch, length, kv_heads, group, value_size)
    softmax = _softmax(q, scale, sinks, logits_soft_cap, alibi_slopes)
    k = _stored(k, k_scale)
    v = _stored(torch.nn.functional.pad(v, (0, head_size - value_size)), v_scale)
    blocks = block_tables.reshape(batch).tolist()
    ends = cache_offset.reshape(batch).tolist()
    for b, before in enumerate(cache_seq_len.reshape(batch).tolist()):
        count = ends[b] - before
        if count <= 0:
            continue
        _check_request(b, before, count, length, blocks[b], kv_cache)
        cached = min(before, window)
        end = cached + count
        slots = kv_cache[blocks[b], :, :, 0]
        new = torch.stack((k[b, :, 0, :count], v[b, :, 0, :count]))
        # Real tokens alone, so that what the other slots and rows hold cannot matter.
        seen_by_all = torch.cat((slots[:, :, :cached], new), dim=2)
        distance = torch.arange(cached, end)[:, None] - torch.arange(end)
        seen = (distance >= 0) & (distance < window)
        keys, values = seen_by_all.unsqueeze(2)
        keys, values = _seen(keys, k_scale), _seen(values[..., :value_size], v_scale)
        attended = softmax.attend(q[b, :, :, :count], keys, values, distance, seen)
        out[b, :count] = attended.permute(2, 0, 1, 3)
        slots[:, :, : min(end, window)] = seen_by_all[:, :, max(0, end - window) :]
    return out.permute(0, 2, 3, 1, 4)


def sliding_window_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    cache_seq_len: Tensor,
    cache_offset: Tensor,
    scale: Tensor,
    block_tables: Tensor,
    dummy: Tensor,
    attn_mask: Tensor | None = None,
    *options: Any,
    **named: Any,
) -> Tensor:
    """``sliding_window_prefill``, q [B, Hkv, G, L, D], with an unused mask."""
    required = (q, k, v, kv_cache, cache_seq_len, cache_offset, scale, block_tables, dummy)
    return sliding_window_prefill(*required, *options, **named)


def _check_request(
    row: int, before: int, count: int, length: int, block: int, kv_cache: Tensor
) -> None:
    blocks = kv_cache.shape[0]
    if before < 0:
        raise RuntimeError(f"cache_seq_len[{row}] is {before}")
    if count > length:
        raise RuntimeError(
            f"cache_offset[{row}] is {before + count}, {count} more than cache_seq_len, "
            f"but q has {length} rows"
        )
    if not 0 <= block < blocks:
        raise IndexError(f"block_tables[{row}] is {block}, the cache has {blocks} blocks")


BODIES: Mapping[str, Callable[..., Any]] = {
    "flash_causal_attention_naive_prefill": flash_causal_attention,
    "flash_causal_attention_naive_decode": flash_causal_attention,
    "causal_attention_naive_prefill": causal_attention,
    "causal_attention_naive_decode": causal_attention,
    "sliding_window_attention_naive_prefill": sliding_window_prefill,
    "sliding_window_attention_naive_decode": sliding_window_decode,
}
