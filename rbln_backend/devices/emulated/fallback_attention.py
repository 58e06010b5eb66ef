"""PyTorch bodies of the attention ops; ``layers.attention_ops`` says what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


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
    starts = seq_idx.flatten().tolist()
    for number, b, rows in _requests(q, query_counts):
        new = _stored(k[b, :, 0, rows], k_scale), _stored(v[b, :, 0, rows], v_scale)
        table, start = _get_table(block_tables, q, query_counts, number), starts[number]
        block_size = kv_cache.shape[4]
        end = min(start + new[0].shape[1], table.numel() * block_size)
        positions = torch.arange(start, end)
        blocks, slots = table[positions // block_size], positions % block_size
        for part, x in enumerate(new):
            tokens = x[:, : positions.numel()].transpose(0, 1)
            kv_cache[:, part][blocks, :, 0, slots, : x.shape[-1]] = tokens
    options = (sinks, logits_soft_cap, alibi_slopes, k_scale, v_scale)
    bounds = (attention_chunk, attention_window, query_counts)
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
    batch, kv_heads, group, length, head_size = q.shape
    value_size = value_size or head_size
    out = q.new_zeros(batch, length, kv_heads, group, value_size)
    starts, block_size = seq_idx.flatten().tolist(), kv_cache.shape[4]
    for number, b, rows in _requests(q, query_counts):
        start, own = int(starts[number]), q[b, :, :, rows]
        table = _get_table(block_tables, q, query_counts, number)
        # Keys and values of the positions that the table has: [2, Hkv, 1, N, D].
        count = min(start + own.shape[2], table.numel() * block_size)
        pages = kv_cache[table[: -(-count // block_size)], :, :, 0]
        keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, None, :count]
        key, row = torch.arange(count), torch.arange(start, start + own.shape[2])[:, None]
        seen = key <= row
        if attention_chunk is not None:
            seen &= key >= row // attention_chunk * attention_chunk
        if attention_window is not None:
            seen &= key > row - attention_window
        keys, values = _seen(keys, k_scale), _seen(values[..., :value_size], v_scale)
        options = (scale, sinks, logits_soft_cap, alibi_slopes)
        attended = _attend(own, keys, values, row - key, seen, *options)
        out[b, rows] = attended.permute(2, 0, 1, 3)
    return out.permute(0, 2, 3, 1, 4)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    distance: Tensor,
    seen: Tensor,
    scale: Tensor,
    sinks: Tensor | None,
    soft_cap: float | None,
    slopes: Tensor | None,
) -> Tensor:
    """Attend in one request: q [Hkv, G, L, D]."""
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"logits_soft_cap is {soft_cap}; it must be positive")
    scores = q.float() @ keys.float().transpose(-1, -2) * float(scale)
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    if slopes is not None:
        scores = scores - slopes.float().reshape(*q.shape[:2], 1, 1) * distance
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.float().reshape(*q.shape[:2], 1, 1)
        scores = torch.cat((scores, column.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    # What a row does not see may be NaN, which times zero would not vanish.
    attended: Tensor = weights @ values.float().nan_to_num(0.0, 0.0, 0.0)
    return attended.to(q.dtype)


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
        queries,
        rows,
        rows[..., : kv_c.shape[-1]],
        kv_cache.expand(-1, 2, -1, -1, -1, -1),
        scale,
        seq_idx,
        block_tables,
        scale,
        query_counts=query_counts,
    )
    return out.permute(0, 3, 1, 2, 4).reshape(q.shape[0], heads, -1)


def _requests(q: Tensor, counts: Tensor | None) -> list[tuple[int, int, slice]]:
    """Return each request's number, and its batch row and rows in q [B, Hkv, G, L, D].

    ``counts``: rows of each of several requests, one after the other in one batch row.
    """
    if counts is None:
        return [(b, b, slice(0, q.shape[3])) for b in range(q.shape[0])]
    ends = zip(counts.tolist(), counts.cumsum(0).tolist(), strict=True)
    return [(n, 0, slice(end - count, end)) for n, (count, end) in enumerate(ends) if count]


def _get_table(block_tables: Tensor, q: Tensor, counts: Tensor | None, number: int) -> Tensor:
    """The blocks of a request."""
    requests = q.shape[0] if counts is None else counts.numel()
    return block_tables.reshape(requests, -1)[number].long()


def _stored(rows: Tensor, scale: Tensor | None) -> Tensor:
    """New keys or values as the cache keeps them; ``scale`` is that of a cache of e4m3."""
    if scale is None:
        return rows
    return (rows.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _seen(rows: Tensor, scale: Tensor | None) -> Tensor:
    """Return the cached keys and values as tokens read them."""
    return rows if scale is None else rows.float() * scale


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
    batch, kv_heads, group, length, head_size = q.shape
    window, value_size = kv_cache.shape[4], v.shape[-1]
    out = q.new_zeros(batch, length, kv_heads, group, value_size)
    k = _stored(k, k_scale)
    v = _stored(torch.nn.functional.pad(v, (0, head_size - value_size)), v_scale)
    cached_lengths, ends = cache_seq_len.flatten().tolist(), cache_offset.flatten().tolist()
    blocks = block_tables.flatten().tolist()
    for number, b, rows in _requests(q, query_counts):
        before, block = cached_lengths[number], blocks[number]
        count = ends[number] - before
        if count <= 0:
            continue
        if before < 0:
            raise RuntimeError(f"cache_seq_len[{number}] is {before}")
        if count > rows.stop - rows.start:
            raise RuntimeError(
                f"cache_offset[{number}] is {ends[number]}, {count} more than cache_seq_len, "
                f"but q has {rows.stop - rows.start} rows"
            )
        if not 0 <= block < kv_cache.shape[0]:
            raise IndexError(
                f"block_tables[{number}] is {block}, the cache has {kv_cache.shape[0]} blocks"
            )
        own = slice(rows.start, rows.start + count)
        cached = min(before, window)
        end = cached + count
        slots = kv_cache[block, :, :, 0]
        new = torch.stack((k[b, :, 0, own], v[b, :, 0, own]))
        # Real tokens alone, so that what the other slots and rows hold cannot matter.
        seen_by_all = torch.cat((slots[:, :, :cached], new), dim=2)
        distance = torch.arange(cached, end)[:, None] - torch.arange(end)
        seen = (distance >= 0) & (distance < window)
        keys, values = seen_by_all.unsqueeze(2)
        keys, values = _seen(keys, k_scale), _seen(values[..., :value_size], v_scale)
        options = (scale, sinks, logits_soft_cap, alibi_slopes)
        attended = _attend(q[b, :, :, own], keys, values, distance, seen, *options)
        out[b, own] = attended.permute(2, 0, 1, 3)
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


BODIES: Mapping[str, Callable[..., Any]] = {
    "flash_causal_attention_naive_prefill": flash_causal_attention,
    "flash_causal_attention_naive_decode": flash_causal_attention,
    "causal_attention_naive_prefill": causal_attention,
    "causal_attention_naive_decode": causal_attention,
    "sliding_window_attention_naive_prefill": sliding_window_prefill,
    "sliding_window_attention_naive_decode": sliding_window_decode,
}
