"""Attention metadata of one graph: the same tensors at every step of that graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from rbln_backend.vllm_compat.surface import AttentionMetadata


@dataclass
class RblnAttentionMetadata(AttentionMetadata):
    """B requests of L query tokens each."""

    batch_size: int
    query_len: int
    is_prefill: bool
    query_counts: Tensor | None = field(default=None, kw_only=True)
    """[R] int32: the tokens of each of R requests that lie one after the other in a batch of one;
    None: one request in each of the B rows. With it, B below stands for R."""


@dataclass
class PagedMetadata(RblnAttentionMetadata):
    """Layers that keep a request's context in P blocks (partitions)."""

    seq_idx: Tensor
    """[B, 1] int64: the position of each request's first query token; 0 in padded rows."""
    block_tables: Tensor
    """[P] int32 of one request in prefill, [B, P] of several; padding holds the null block 0."""
    one_block: bool
    """True when one block holds a whole request (block_size == max_model_len)."""
    window: int | None = None
    """The positions that a query sees, its own included, where that is not the whole context."""


@dataclass
class WindowMetadata(RblnAttentionMetadata):
    """Layers that keep the last ``window`` tokens in one block per request, shifted in place."""

    cache_seq_len: Tensor
    """[B, 1] int32: the request's tokens before this step that the block holds, at most
    ``window``."""
    cache_offset: Tensor
    """[B, 1] int32: ``cache_seq_len`` plus the step's real tokens; equal to it in padded rows."""
    block_tables: Tensor
    """[B] int32 in prefill, [B, 1] in decode; padded rows hold the null block 0."""


@dataclass
class EncoderMetadata(RblnAttentionMetadata):
    """Layers without a cache, which attend in both directions: B is 1, L holds a whole prompt."""

    last_row: Tensor
    """[1] int64: the row of the prompt's last token; the rows after it are padding."""
