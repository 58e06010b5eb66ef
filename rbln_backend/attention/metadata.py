"""What the attention layers of one graph read: the same tensors at every step of that graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rbln_backend.vllm_compat.surface import AttentionMetadata


@dataclass
class RblnAttentionMetadata(AttentionMetadata):
    """B requests, P blocks per request (partitions)."""

    seq_idx: Tensor
    """[B, P] int32: tokens already cached in each partition before this step."""
    block_tables: Tensor
    """[P] int32 in prefill, [B, P] in decode; padded entries hold the null block 0."""
    batch_size: int
    query_len: int
    is_prefill: bool
    one_block: bool
    """True when one block holds a whole request (block_size == max_model_len)."""
