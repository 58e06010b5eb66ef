"""vLLM's attention backend interface over the RBLN custom ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rbln_backend.attention.metadata import (
    PagedMetadata,
    RblnAttentionMetadata,
    WindowMetadata,
)
from rbln_backend.attention.ops import AttentionOptions, EmulatedAttention
from rbln_backend.attention.sdk_ops import SdkAttention
from rbln_backend.compiler.device import find_npu
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.unsupported import (
    ALIBI,
    ENCODER_DECODER,
    KV_SHARING,
    SOFT_CAP,
    Feature,
)
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

# What vLLM's models tell every backend and what changes nothing for text.
_IDLE_OPTIONS = frozenset(("layer_idx", "mm_prefix_clamp_sliding_window"))
# Head sizes the RBLN attention kernels accept (vendor documentation of the native path).
SUPPORTED_HEAD_SIZES = [32, 64, 80, 96, 128, 160, 192, 224, 256]


class RblnAttentionBackend(AttentionBackend):
    """Causal decoder attention over caches of [num_blocks, 2, Hkv, 1, block_size, D].

    Blocks are pages of a request's whole context, or hold the window of one request.
    """

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
        # Our caches are tensors per layer whatever this says. It tells vLLM that groups may differ
        # in page size; layer-outermost layouts would blow their blocks up to a common size.
        return (KVCacheLayout.BLHNC,)


class RblnAttentionMetadataBuilder(AttentionMetadataBuilder[RblnAttentionMetadata]):
    """vLLM asks a backend for a builder; our runner makes the metadata once per graph instead."""

    def build(self, *args: Any, **kwargs: Any) -> RblnAttentionMetadata:
        raise NotImplementedError("RblnModelRunner builds attention metadata per graph")


def _missing_feature(attn_type: str, kv_sharing_target_layer_name: str | None) -> Feature | None:
    """The first thing that this layer needs and we lack, or None."""
    if attn_type != AttentionType.DECODER:
        return ENCODER_DECODER
    if kv_sharing_target_layer_name is not None:
        return KV_SHARING
    return None


def _refuse_options(options: Mapping[str, Any]) -> None:
    """Raise for what a model asks of this layer by a name that only other backends know."""
    asked = {k for k, value in options.items() if value is not None} - _IDLE_OPTIONS
    if asked:
        raise UnsupportedModelError(
            f"attention layers with {', '.join(sorted(asked))}: not supported by the RBLN backend"
        )


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
        sinks: Tensor | None = None,
        **options: Any,
    ) -> None:
        missing = _missing_feature(attn_type, kv_sharing_target_layer_name)
        if missing is not None:
            raise missing.refusal()
        _refuse_options(options)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        # The ops take the scale as a tensor, which makes it a graph input.
        self.scale_tensor = torch.tensor(self.scale, dtype=torch.float32)
        # A tensor as well, for the slopes of each tensor-parallel rank are its own.
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        )
        self.sinks = sinks
        # vLLM writes "no cap" as 0.
        self.soft_cap = logits_soft_cap or None
        self.sliding_window = sliding_window
        rbln = configured(get_current_vllm_config())
        npu = find_npu(rbln)
        if npu is not None and self.soft_cap is not None:
            raise SOFT_CAP.refusal(f"device 'rebel', cap {self.soft_cap}")
        if npu is not None and alibi_slopes is not None:
            raise ALIBI.refusal("device 'rebel'")
        if npu is not None and head_size not in SUPPORTED_HEAD_SIZES:
            raise UnsupportedModelError(
                f"head size {head_size}: the attention kernels of {npu.name} have "
                f"{', '.join(map(str, SUPPORTED_HEAD_SIZES))}"
            )
        self._attention: EmulatedAttention | SdkAttention = (
            EmulatedAttention(
                AttentionOptions(
                    sinks=sinks, soft_cap=self.soft_cap, alibi_slopes=self.alibi_slopes
                ),
                use_custom_kernel=rbln.use_custom_kernel,
            )
            if npu is None
            else SdkAttention(window=sliding_window, appends=npu.appends_windows, sinks=sinks)
        )

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
        result = self._attend(
            layer,
            attn_metadata,
            q=query.view(q_shape).permute(0, 2, 3, 1, 4),
            k=key.view(kv_shape).permute(0, 2, 3, 1, 4),
            v=value.view(kv_shape).permute(0, 2, 3, 1, 4),
            kv_cache=kv_cache,
            scale=self.scale_tensor,
        )
        output.copy_(result.permute(0, 3, 1, 2, 4).reshape(query.shape))
        return output

    def _attend(self, layer: Any, metadata: RblnAttentionMetadata, **tensors: Tensor) -> Tensor:
        """q [B, Hkv, G, L, D]; k, v [B, Hkv, 1, L, D]; the result is shaped like q.

        What a layer does follows from the metadata of its KV cache group: a window that reaches
        over the whole context is no window.
        """
        if isinstance(metadata, WindowMetadata):
            return self._attention.shifted_window(
                **tensors,
                cache_seq_len=metadata.cache_seq_len,
                cache_offset=metadata.cache_offset,
                block_tables=metadata.block_tables,
                is_prefill=metadata.is_prefill,
            )
        assert isinstance(metadata, PagedMetadata)
        tensors |= {"seq_idx": metadata.seq_idx, "block_tables": metadata.block_tables}
        if metadata.window is not None:
            assert isinstance(self._attention, SdkAttention)
            return self._attention.appended_window(**tensors, window=metadata.window)
        return self._attention.causal(
            **tensors,
            is_prefill=metadata.is_prefill,
            one_block=metadata.one_block,
            layer=layer,
        )
