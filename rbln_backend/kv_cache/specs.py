"""KV cache specs of our layers for vLLM's KV cache manager: one class per kind of cache.

vLLM finds the manager of a spec by its class (``register_specs``) and forms one group, with one
block table, of all layers whose specs are uniform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
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
)

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.limits import ENCODER_DECODER, MLA, PREFIX_LM, STATE_SPACE, Feature


@dataclass(frozen=True, kw_only=True)
class PagedSpec(FullAttentionSpec):
    """A full-attention layer: blocks of ``block_size`` tokens, shared between equal prefixes.

    ``head_size_v`` is 0 where values are cached within keys (latent attention).
    """


@dataclass(frozen=True, kw_only=True)
class WindowSpec(AttentionSpec):
    """A sliding-window layer that is shifted in place: one block of ``window`` tokens per request.

    Its blocks and its log lie outside vLLM's shared pool, so this group neither divides that pool
    nor constrains the block size of other groups: ``block_size`` is theirs. A page costs the pool
    one byte, the least that vLLM's arithmetic allows.
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
        """True where vLLM needs a cacheable group; ``coordinator`` finds the hits of this one."""
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
        """Return True if all layers have this window: they share a block table, of any heads."""
        return all(
            isinstance(spec, WindowSpec) and spec.window == self.window
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True, kw_only=True)
class AppendedWindowSpec(SlidingWindowSpec):
    """A sliding-window layer in pages, which are freed once the window has left them.

    Blocks of ``block_size`` tokens, shared between equal prefixes as those of ``PagedSpec`` are.
    """


LayerSpec: TypeAlias = PagedSpec | WindowSpec | AppendedWindowSpec


def window_in(spec: LayerSpec) -> int | None:
    """Return the window of a layer in tokens, None for one that keeps its whole context."""
    if isinstance(spec, WindowSpec):
        return spec.window
    return spec.sliding_window if isinstance(spec, AppendedWindowSpec) else None


def bytes_per_token(spec: AttentionSpec) -> int:
    """Return the bytes of K and V of one token in one layer."""
    return 2 * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize


def get_window(spec: KVCacheSpec, max_model_len: int) -> int | None:
    """Return the window of vLLM's spec, None where the layer attends to the whole context."""
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    return window if window is not None and window < max_model_len else None


def get_parts(spec: LayerSpec) -> int:
    """Return 2 for a layer that caches keys and values, 1 where keys contain the values."""
    return 2 if spec.head_size_v else 1


_KINDS_WITHOUT_OP: Mapping[type[KVCacheSpec], Feature] = {
    SlidingWindowMLASpec: MLA,
    MambaSpec: STATE_SPACE,
    CrossAttentionSpec: ENCODER_DECODER,
}
"""vLLM's specs that need an op we lack."""
_KNOWN_KINDS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MLAAttentionSpec)


def check_supported(layer_name: str, spec: KVCacheSpec) -> AttentionSpec:
    """Return ``spec`` if it is causal attention, else raise ``UnsupportedModelError``."""
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
    """Return the spec of each layer of a group; vLLM wraps layers of different shapes in one."""
    found = dict.fromkeys(layer_names, spec)
    if isinstance(spec, UniformTypeKVCacheSpecs):
        found = spec.kv_cache_specs
    return {name: _known(found[name]) for name in layer_names}


def any_layer_spec(spec: KVCacheSpec) -> LayerSpec:
    """Return the spec of one layer of a group, on whichever rank it is."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    return _known(spec)


def _known(spec: KVCacheSpec) -> LayerSpec:
    assert isinstance(spec, LayerSpec), str(type(spec))
    return spec
