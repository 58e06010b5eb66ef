"""Which kind of KV cache each layer gets, and what that costs, before anything is allocated."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from rbln_backend.errors import ConfigError
from rbln_backend.kv_cache.layout import log_pages
from rbln_backend.kv_cache.specs import (
    LayerSpec,
    PagedSpec,
    WindowSpec,
    WindowStorage,
    appended_window_spec,
    bytes_per_token,
    check_supported,
    paged_spec,
    window_of,
    window_spec,
)
from rbln_backend.unsupported import CHUNKED_ATTENTION, UNEQUAL_HEADS
from rbln_backend.vllm_compat.surface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

# Tokens of a log page below which finding and copying pages costs more than they save.
SMALLEST_PAGE = 4


@dataclass(frozen=True, kw_only=True)
class KvLimits:
    """What of the engine's configuration decides the KV cache."""

    max_model_len: int
    max_num_seqs: int
    chunk_tokens: int
    block_size: int
    unit: int
    """Tokens at whose multiples prefixes can be reused."""
    log_bytes: int
    """The most that all prefix logs may take; 0: no prefix reuse on window layers."""
    log_tokens: int | None
    """Tokens that a prefix log keeps, where the user says so."""
    hybrid: bool
    """False: the user switched vLLM's hybrid KV cache manager off."""
    appends_windows: bool = False
    """The device keeps windows in pages."""
    own_ops: bool = True
    """Attention is ours, which knows chunks of the context and values narrower than keys."""
    checks_drafts: bool = False
    """Tokens may be taken back, which a window that has slid cannot do."""


def plan_specs(
    layers: Mapping[str, KVCacheSpec], limits: KvLimits, shared: Collection[str] = ()
) -> dict[str, LayerSpec]:
    """Our spec for each attention layer that has a cache.

    Those of ``shared`` have it for others as well. A window would have moved on before those read
    it, so they keep their whole context. So do all where drafts are checked: a draft that turns out
    wrong would have cost a window its oldest token.

    Raises ``UnsupportedModelError`` for a kind of cache without an op, ``ConfigError`` where window
    layers meet a configuration that excludes them.
    """
    dense = {name: check_supported(name, spec) for name, spec in layers.items()}
    windows = {
        name: None
        if limits.checks_drafts or name in shared
        else window_of(spec, limits.max_model_len)
        for name, spec in dense.items()
    }
    if not limits.own_ops:
        _refuse_own_ops(dense, limits.max_model_len)
    if any(windows.values()) and not limits.hybrid:
        raise ConfigError(
            "sliding-window layers keep one block per request, which needs vLLM's hybrid KV cache "
            "manager: drop --disable-hybrid-kv-cache-manager"
        )
    storage = _window_storage(dense, windows, _fit_unit(windows, limits))
    planned: dict[str, LayerSpec] = {}
    for name, spec in dense.items():
        window = windows[name]
        if window is None:
            planned[name] = paged_spec(spec, limits.block_size)
        elif limits.appends_windows:
            planned[name] = appended_window_spec(spec, window, limits.block_size)
        else:
            planned[name] = window_spec(spec, window, limits.block_size, storage[window])
    return planned


def _refuse_own_ops(layers: Mapping[str, AttentionSpec], context: int) -> None:
    """Raise ``UnsupportedModelError`` for a layer that only our own ops can compute."""
    for name, spec in layers.items():
        if isinstance(spec, ChunkedLocalAttentionSpec) and spec.attention_chunk_size < context:
            raise CHUNKED_ATTENTION.refusal(f"layer {name}")
        if spec.head_size_v not in (0, spec.head_size):
            sizes = f"{spec.head_size} and {spec.head_size_v}"
            raise UNEQUAL_HEADS.refusal(f"layer {name} with heads of {sizes}")


def _fit_unit(windows: Mapping[str, int | None], limits: KvLimits) -> KvLimits:
    """Pages that fill every window exactly, where chunks may start in the middle of one.

    Of a window that is no whole number of pages, a step that slides through it never has the
    first page whole.
    """
    sizes = [window for window in windows.values() if window is not None]
    fitting = math.gcd(limits.unit, *sizes)
    if limits.unit >= limits.chunk_tokens or fitting < SMALLEST_PAGE:
        return limits
    return replace(limits, unit=fitting)


def _window_storage(
    layers: Mapping[str, AttentionSpec], windows: Mapping[str, int | None], limits: KvLimits
) -> dict[int, WindowStorage]:
    """Blocks and log pages by window."""
    token_bytes: dict[int, int] = defaultdict(int)
    for name, window in windows.items():
        if window is not None:
            token_bytes[window] += bytes_per_token(layers[name])
    any_paged = None in windows.values()
    share = limits.log_bytes // max(1, len(token_bytes))
    return {
        window: WindowStorage(
            own_blocks=limits.max_num_seqs + 1 if any_paged else 0,
            log_pages=log_pages(
                window=window,
                unit=limits.unit,
                max_model_len=limits.max_model_len,
                max_num_seqs=limits.max_num_seqs,
                chunk_tokens=limits.chunk_tokens,
                max_bytes=share,
                token_bytes=all_layers,
                wanted_tokens=limits.log_tokens,
            ),
            page_tokens=limits.unit,
        )
        for window, all_layers in token_bytes.items()
    }


def window_bytes(specs: Iterable[KVCacheSpec], max_num_seqs: int) -> int:
    """Bytes of all window blocks and prefix logs."""
    return sum(
        bytes_per_token(spec)
        * ((max_num_seqs + 1) * spec.window + spec.log_pages * spec.page_tokens)
        for spec in specs
        if isinstance(spec, WindowSpec)
    )


def reuse_unit_of(specs: Iterable[KVCacheSpec], unit: int) -> int:
    """Tokens at whose multiples prefixes can be reused: a log page, or ``unit`` without logs."""
    return next((spec.page_tokens for spec in specs if isinstance(spec, WindowSpec)), unit)


def paged_bytes_per_block(specs: Iterable[KVCacheSpec]) -> int:
    """Bytes of one block in all layers with pages; 0 if there are none.

    Where some of them are windows, vLLM's pool needs less: groups of layers share its memory.
    """
    paged = (PagedSpec, SlidingWindowSpec)
    return sum(spec.page_size_bytes for spec in specs if isinstance(spec, paged))
