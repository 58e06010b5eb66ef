"""vLLM's attention backend interface over the RBLN custom ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from rbln_backend.devices.port import Capabilities, device_capabilities
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.kv_cache.fp8 import FP8_DTYPES
from rbln_backend.layers.attention_ops import AttentionOptions, EmulatedAttention, SdkAttention
from rbln_backend.limits import ALIBI, ENCODER_DECODER, KV_DTYPE, KV_SHARING, SOFT_CAP
from rbln_backend.settings import configured


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


# What vLLM's models tell every backend and what changes nothing for text.
_IDLE_OPTIONS = frozenset(("layer_idx", "mm_prefix_clamp_sliding_window"))
# Head sizes the RBLN attention kernels accept (vendor documentation of the native path).
SUPPORTED_HEAD_SIZES = [32, 64, 80, 96, 128, 160, 192, 224, 256]


class RblnAttentionBackend(AttentionBackend):
    """Causal decoder attention over caches of [num_blocks, 2, Hkv, 1, block_size, D].

    Blocks are pages of a request's whole context, or hold the window of one request.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        "float32",
        *FP8_DTYPES,
    ]

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


def _refuse_options(options: Mapping[str, Any]) -> None:
    """Raise for what a model asks of this layer by a name that only other backends know."""
    unknown = {k for k, value in options.items() if value is not None} - _IDLE_OPTIONS
    if unknown:
        raise UnsupportedModelError(
            f"attention layers with {', '.join(sorted(unknown))}: not supported by the RBLN backend"
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
        if attn_type != AttentionType.DECODER:
            raise ENCODER_DECODER.refusal()
        _refuse_options(options)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self._cache_dtype = FP8_DTYPES.get(kv_cache_dtype)
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
        self.shares_kv = kv_sharing_target_layer_name is not None
        config = get_current_vllm_config()
        rbln = configured(config)
        self._context: int | None = getattr(config.model_config, "max_model_len", None)
        capabilities = device_capabilities(rbln)
        self._refuse_elsewhere(capabilities, uses_custom_kernel=rbln.use_custom_kernel)
        self._attention: EmulatedAttention | SdkAttention = (
            EmulatedAttention(
                AttentionOptions(
                    sinks=sinks, soft_cap=self.soft_cap, alibi_slopes=self.alibi_slopes
                ),
                use_custom_kernel=rbln.use_custom_kernel,
            )
            if capabilities.general_attention
            else SdkAttention(
                window=sliding_window,
                appends=capabilities.appends_windows,
                longest_first=capabilities.longest_first,
                sinks=sinks,
                cache_dtype=self._cache_dtype,
            )
        )

    def _refuse_elsewhere(self, capabilities: Capabilities, *, uses_custom_kernel: bool) -> None:
        """Raise for options that only the general attention ops have."""
        is_limited = not capabilities.general_attention
        if is_limited and self.soft_cap is not None:
            raise SOFT_CAP.refusal(f"device {capabilities.device!r}, cap {self.soft_cap}")
        if is_limited and self.alibi_slopes is not None:
            raise ALIBI.refusal(f"device {capabilities.device!r}")
        if self.shares_kv and (is_limited or uses_custom_kernel):
            raise KV_SHARING.refusal()
        if self._cache_dtype is not None and uses_custom_kernel:
            raise KV_DTYPE.refusal(f"--kv-cache-dtype {self.kv_cache_dtype}")
        if self._cache_dtype is not None and is_limited:
            # Another op than these layers' takes 8-bit floats.
            flag = f"--kv-cache-dtype {self.kv_cache_dtype}"
            block = get_current_vllm_config().cache_config.block_size
            window = self._within_context(self.sliding_window)
            if window is not None:
                raise KV_DTYPE.refusal(f"{flag}, a window of {window}")
            if self.sinks is None and block == self._context:
                raise KV_DTYPE.refusal(
                    f"{flag}, --block-size {block} for a context of {self._context} tokens"
                )
        if is_limited and self.head_size not in SUPPORTED_HEAD_SIZES:
            raise UnsupportedModelError(
                f"head size {self.head_size}: the attention kernels of {capabilities.product} have "
                f"{', '.join(map(str, SUPPORTED_HEAD_SIZES))}"
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """As upstream; called once, by vLLM's attention layer."""
        if isinstance(self._attention, SdkAttention):
            self._attention.prepare_weights()

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
        """query [B*L, Hq, D]; key [B*L, Hkv, D]; value [B*L, Hkv, Dv]; writes output [B*L, Hq, Dv].

        A layer that shares the cache of another has neither key nor value.
        """
        given = {"q": query} if self.shares_kv else {"q": query, "k": key, "v": value}
        tensors = {name: self._by_head(rows, attn_metadata) for name, rows in given.items()}
        tensors |= {"kv_cache": kv_cache, "scale": self.scale_tensor}
        if self._cache_dtype is not None and isinstance(self._attention, EmulatedAttention):
            tensors |= {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        result = self._attend(layer, attn_metadata, **tensors)
        output.copy_(result.permute(0, 3, 1, 2, 4).reshape(output.shape))
        return output

    def _by_head(self, rows: Tensor, metadata: RblnAttentionMetadata) -> Tensor:
        """rows [B*L, H, D] as the ops take them: [B, Hkv, H / Hkv, L, D]."""
        tokens = (metadata.batch_size, metadata.query_len)
        heads = rows.view(*tokens, self.num_kv_heads, -1, rows.shape[-1])
        return heads.permute(0, 2, 3, 1, 4)

    def _attend(self, layer: Any, metadata: RblnAttentionMetadata, **tensors: Any) -> Tensor:
        """q, k, v as in ``layers.attention_ops``; the result is [B, Hkv, G, L, Dv].

        What a layer does follows from the metadata of its KV cache group: a window that reaches
        over the whole context is no window.
        """
        if metadata.query_counts is not None:
            tensors |= {"query_counts": metadata.query_counts}
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
        tensors |= {
            "chunk": self._within_context(getattr(layer, "attention_chunk_size", None)),
            # Of a cache that is shared: other windows are shifted.
            "window": self._within_context(self.sliding_window),
        }
        if self.shares_kv:
            assert isinstance(self._attention, EmulatedAttention)
            return self._attention.shared(**tensors)
        return self._attention.causal(
            **tensors,
            is_prefill=metadata.is_prefill,
            one_block=metadata.one_block,
            layer=layer,
        )

    def _within_context(self, tokens: int | None) -> int | None:
        """``tokens`` where they are less than the whole context."""
        is_bound = tokens is not None and (self._context is None or tokens < self._context)
        return tokens if is_bound else None
