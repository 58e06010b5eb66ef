"""vLLM's attention backend interface over the RBLN custom ops."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rbln_backend.attention.metadata import RblnAttentionMetadata
from rbln_backend.attention.ops import CausalAttention
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.vllm_compat.surface import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    KVCacheLayout,
    MultipleOf,
    configured,
    get_current_vllm_config,
)

# Head sizes the RBLN attention kernels accept (vendor documentation of the native path).
SUPPORTED_HEAD_SIZES = [32, 64, 80, 96, 128, 160, 192, 224, 256]


class RblnAttentionBackend(AttentionBackend):
    """Causal decoder attention over a paged cache of [num_blocks, 2, Hkv, 1, block_size, D]."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "float32"]

    @staticmethod
    def get_name() -> str:
        # vLLM looks the name up in its enum of backends, which keeps CUSTOM for plug-ins.
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RblnAttentionImpl]:
        return RblnAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RblnAttentionMetadataBuilder]:
        return RblnAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return SUPPORTED_HEAD_SIZES

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Each layer's cache is one contiguous region of whole blocks.
        return (KVCacheLayout.LBHNC,)


class RblnAttentionMetadataBuilder(AttentionMetadataBuilder[RblnAttentionMetadata]):
    """vLLM asks a backend for a builder; our runner makes the metadata once per graph instead."""

    def build(self, *args: Any, **kwargs: Any) -> RblnAttentionMetadata:
        raise NotImplementedError("RblnModelRunner builds attention metadata per graph")


def _block_reason(
    alibi_slopes: list[float] | None,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    attn_type: str,
    kv_sharing_target_layer_name: str | None,
) -> str | None:
    """The first reason why this layer cannot run, or None."""
    if alibi_slopes is not None:
        return "ALiBi position biases"
    if sliding_window is not None:
        return f"sliding-window attention (window {sliding_window})"
    if logits_soft_cap:
        return f"attention logit soft capping (cap {logits_soft_cap})"
    if attn_type != AttentionType.DECODER:
        return f"{attn_type} attention"
    if kv_sharing_target_layer_name is not None:
        return "KV sharing between layers"
    return None


class RblnAttentionImpl(AttentionImpl[RblnAttentionMetadata]):
    """One layer's attention; traced into the whole-model graph, never run op by op."""

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
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        reason = _block_reason(
            alibi_slopes, sliding_window, logits_soft_cap, attn_type, kv_sharing_target_layer_name
        )
        if reason is None and extra.get("sinks") is not None:
            reason = "attention sinks"
        if reason is not None:
            raise UnsupportedModelError(f"the RBLN backend does not support {reason}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        # The ops take the scale as a tensor, which makes it a graph input.
        self.scale_tensor = torch.tensor(self.scale, dtype=torch.float32)
        rbln = configured(get_current_vllm_config())
        self._attention = CausalAttention(use_custom_kernel=rbln.use_custom_kernel)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: RblnAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query, output [B*L, Hq, D]; key, value [B*L, Hkv, D]; writes ``output``."""
        batch, length = attn_metadata.batch_size, attn_metadata.query_len
        group = self.num_heads // self.num_kv_heads
        q_shape = (batch, length, self.num_kv_heads, group, self.head_size)
        kv_shape = (batch, length, self.num_kv_heads, 1, self.head_size)
        result = self._attention(
            q=query.view(q_shape).permute(0, 2, 3, 1, 4),
            k=key.view(kv_shape).permute(0, 2, 3, 1, 4),
            v=value.view(kv_shape).permute(0, 2, 3, 1, 4),
            kv_cache=kv_cache,
            scale=self.scale_tensor,
            seq_idx=attn_metadata.seq_idx,
            block_tables=attn_metadata.block_tables,
            is_prefill=attn_metadata.is_prefill,
            one_block=attn_metadata.one_block,
        )
        output.copy_(result.permute(0, 3, 1, 2, 4).reshape(query.shape))
        return output
