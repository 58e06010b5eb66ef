"""What vLLM's KV cache manager is told about our layers: one spec per kind of cache.

vLLM finds the manager of a spec by its class (``register_specs``) and forms one group, with one
block table, of all layers whose specs are uniform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.unsupported import (
    ENCODER_DECODER,
    MLA,
    PREFIX_LM,
    STATE_SPACE,
    Feature,
)
from rbln_backend.vllm_compat.surface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    VllmConfig,
)


@dataclass(frozen=True, kw_only=True)
class PagedSpec(FullAttentionSpec):
    """A full-attention layer: blocks of ``block_size`` tokens, shared between equal prefixes.

    ``head_size_v`` is 0 where values are cached within keys (latent attention).
    """


@dataclass(frozen=True, kw_only=True)
class WindowSpec(AttentionSpec):
    """A sliding-window layer that is shifted in place: one block of ``window`` tokens per request.

    Its blocks and its log lie outside vLLM's shared pool, so this group neither divides that pool
    nor ties the block size of other groups to its own: ``block_size`` is theirs, and a page costs
    the pool one byte, the least that vLLM's arithmetic allows.
    """

    window: int
    """Positions of a block: the last ``window`` tokens, left-aligned."""
    own_blocks: int
    """Blocks of the group's own pool, null block included; 0: vLLM's pool has nothing else."""
    log_pages: int
    """Pages of the prefix log, null page included; 0: no prefix reuse."""
    page_tokens: int

    @property
    def prefix_cacheable(self) -> bool:
        """Hits on this group are ours to find (``coordinator``), but vLLM wants one cacheable."""
        return self.own_blocks == 0

    @property
    def page_size_bytes(self) -> int:
        return 1

    @property
    def block_table_token_alignment(self) -> int | None:
        return None

    @property
    def uses_slot_mapping(self) -> bool:
        return False

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        return 1

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Layers of one window share a block table, whatever their heads."""
        return all(
            isinstance(spec, WindowSpec) and spec.window == self.window
            for spec in kv_cache_specs.values()
        )


LayerSpec: TypeAlias = PagedSpec | WindowSpec | SlidingWindowSpec
"""What a layer may have; vLLM's own is for windows in pages, which are appended to and given back.
"""


def window_in(spec: LayerSpec) -> int | None:
    """The window of a layer, or None where it keeps its whole context."""
    if isinstance(spec, WindowSpec):
        return spec.window
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None


def bytes_per_token(spec: AttentionSpec) -> int:
    """Bytes of K and V of one token in one layer."""
    return 2 * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize


@dataclass(frozen=True)
class WindowStorage:
    """How many blocks and pages the window groups of an engine get; see ``WindowSpec``."""

    own_blocks: int
    log_pages: int
    page_tokens: int


def window_of(spec: KVCacheSpec, max_model_len: int) -> int | None:
    """The window of a layer's spec, or None when the layer sees the whole context."""
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    return window if window is not None and window < max_model_len else None


def _stored_dtype(spec: AttentionSpec) -> torch.dtype:
    """What a layer's cache holds; vLLM calls e4m3 bytes, and no other bytes are let through."""
    return torch.float8_e4m3fn if spec.dtype == torch.uint8 else spec.dtype


def paged_spec(spec: AttentionSpec, block_size: int) -> PagedSpec:
    """Our spec of a layer that keeps its whole context."""
    return PagedSpec(
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=0 if isinstance(spec, MLAAttentionSpec) else spec.head_size,
        dtype=_stored_dtype(spec),
    )


def parts_of(spec: LayerSpec) -> int:
    """How many tensors of a token a layer keeps: keys and values, or keys that hold the values."""
    return 2 if spec.head_size_v else 1


def appended_window_spec(spec: AttentionSpec, window: int, block_size: int) -> SlidingWindowSpec:
    """vLLM's spec of a layer that keeps the last ``window`` tokens in pages."""
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=_stored_dtype(spec),
        sliding_window=window,
    )


def window_spec(
    spec: AttentionSpec, window: int, block_size: int, storage: WindowStorage
) -> WindowSpec:
    """Our spec of a layer that keeps the last ``window`` tokens."""
    return WindowSpec(
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=_stored_dtype(spec),
        window=window,
        own_blocks=storage.own_blocks,
        log_pages=storage.log_pages,
        page_tokens=storage.page_tokens,
    )


_KINDS_WITHOUT_OP: Mapping[type[KVCacheSpec], Feature] = {
    SlidingWindowMLASpec: MLA,
    MambaSpec: STATE_SPACE,
    CrossAttentionSpec: ENCODER_DECODER,
}
"""vLLM's specs that are known to need an op we lack."""
_KNOWN_KINDS = (
    FullAttentionSpec,
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
    MLAAttentionSpec,
)


def check_supported(layer_name: str, spec: KVCacheSpec) -> AttentionSpec:
    """``spec`` if it is dense causal attention; raises ``UnsupportedModelError`` otherwise."""
    kind = type(spec)
    if kind in _KINDS_WITHOUT_OP:
        raise _KINDS_WITHOUT_OP[kind].refusal(f"layer {layer_name}")
    known = kind in _KNOWN_KINDS
    if not known or not isinstance(spec, AttentionSpec):
        raise UnsupportedModelError(
            f"layer {layer_name}: KV cache kind {kind.__name__} is not supported by the "
            "RBLN backend, which has full, latent and chunked attention and sliding windows"
        )
    if isinstance(spec, FullAttentionSpec) and spec.non_causal:
        raise PREFIX_LM.refusal(f"layer {layer_name}")
    return spec


def layer_specs(spec: KVCacheSpec, layer_names: list[str]) -> dict[str, LayerSpec]:
    """The spec of each layer of a group; vLLM wraps layers of different shapes in one."""
    found = dict.fromkeys(layer_names, spec)
    if isinstance(spec, UniformTypeKVCacheSpecs):
        found = spec.kv_cache_specs
    return {name: _known(found[name]) for name in layer_names}


def any_layer_spec(spec: KVCacheSpec) -> LayerSpec:
    """The spec of some layer of a group, whichever ranks the layers are on."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    return _known(spec)


def _known(spec: KVCacheSpec) -> LayerSpec:
    assert isinstance(spec, LayerSpec), str(type(spec))
    return spec
