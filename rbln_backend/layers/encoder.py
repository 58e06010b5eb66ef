"""Attention without a cache: every token of a prompt sees every other, before and after it.

Models of this kind (BERT and its relatives) pool and never generate, so a whole prompt is one
run and nothing of it is kept. The vendor documents no op for it; plain tensor operators say it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from rbln_backend.layers.attention import EncoderMetadata, RblnAttentionBackend
from rbln_backend.limits import ALIBI, SOFT_CAP


class EncoderAttentionBackend(RblnAttentionBackend):
    """As ``RblnAttentionBackend``, for layers that have no KV cache."""

    @staticmethod
    def get_impl_cls() -> type[EncoderAttentionImpl]:  # type: ignore[override]
        return EncoderAttentionImpl

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        # Any: no kernel of ours is involved.
        return []

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.ENCODER_ONLY


class EncoderAttentionImpl(AttentionImpl[EncoderMetadata]):
    """One layer's attention over one prompt, in both directions."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.ENCODER_ONLY,
        kv_sharing_target_layer_name: str | None = None,
        **_: Any,
    ) -> None:
        """``sliding_window`` w: a token sees those less than w positions away, either way."""
        if alibi_slopes is not None:
            raise ALIBI.refusal()
        if logits_soft_cap:
            raise SOFT_CAP.refusal("attention in both directions")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: EncoderMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query, output [L, Hq, D]; key, value [L, Hkv, D]; writes ``output``.

        Rows after the prompt's last are padding: no row of the prompt sees them.
        """
        length, group = attn_metadata.query_len, self.num_heads // self.num_kv_heads
        q = query.view(1, length, self.num_heads, self.head_size).transpose(1, 2)
        k, v = (
            rows.view(1, length, self.num_kv_heads, self.head_size).transpose(1, 2)
            for rows in (key, value)
        )
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        result = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self._visible(attn_metadata), scale=self.scale
        )
        output.copy_(result.transpose(1, 2).reshape(query.shape))
        return output

    def _visible(self, metadata: EncoderMetadata) -> Tensor:
        """[1, 1, 1 or L, L] bool: which keys (columns) a query row sees."""
        rows = torch.arange(metadata.query_len)
        visible = rows <= metadata.last_row
        if self.sliding_window is None:
            return visible.view(1, 1, 1, -1)
        column, row = rows.view(1, -1), rows.view(-1, 1)
        near = (column > row - self.sliding_window) & (column < row + self.sliding_window)
        # A padded row far from the prompt sees itself at least. A softmax over nothing may be NaN
        # on a device, and in the next layer NaN times a weight of zero would reach the prompt.
        return ((near & visible) | (column == row)).view(1, 1, metadata.query_len, -1)
