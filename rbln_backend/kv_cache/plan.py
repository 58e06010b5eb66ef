"""Plan of the KV cache: the kind of each layer's cache and its bytes, before any allocation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheSpec, MLAAttentionSpec

from rbln_backend.errors import ConfigError
from rbln_backend.kv_cache.layout import log_pages
from rbln_backend.kv_cache.specs import (
    AppendedWindowSpec,
    LayerSpec,
    PagedSpec,
    WindowSpec,
    bytes_per_token,
    check_supported,
    get_window,
)
from rbln_backend.limits import CHUNKED_ATTENTION, SPECULATION_WINDOWS, UNEQUAL_HEADS

# Tokens. Finding and copying smaller pages costs more than they save.
SMALLEST_PAGE = 4


@dataclass(frozen=True, kw_only=True)
class KvLimits:
    """The part of the engine's configuration that the KV cache depends on."""

    max_model_len: int
    max_num_seqs: int
    chunk_tokens: int
    block_size: int
    unit: int
    """Tokens at whose multiples prefixes can be reused."""
    log_bytes: int
    """Upper bound of all prefix logs; 0: no prefix reuse on window layers."""
    log_tokens: int | None
    """Tokens that a prefix log keeps; None: derived from ``log_bytes``."""
    hybrid: bool
    """False: vLLM's hybrid KV cache manager is disabled."""
    appends_windows: bool = False
    """The device keeps windows in pages."""
    own_ops: bool = True
    """Attention runs in our ops, which support chunked attention and values narrower than keys."""
    checks_drafts: bool = False
    """Steps may roll tokens back, which is impossible once a window has been shifted."""

    @property
    def stores_windows(self) -> bool:
        return self.appends_windows or not self.checks_drafts


def plan_specs(
    layers: Mapping[str, KVCacheSpec], limits: KvLimits, shared: Collection[str] = ()
) -> dict[str, LayerSpec]:
    """Return our spec of each attention layer that has a cache.

    Other layers read the caches of ``shared`` layers. A window would have slid before they read
    it, so ``shared`` layers keep their whole context. So do all layers where drafts are checked: a
    rejected draft would have dropped the oldest token of a window. Windows in pages lose none.

    Raises ``UnsupportedModelError`` for a kind of cache without an op, ``ConfigError`` for window
    layers without the hybrid KV cache manager.
    """
    dense = {name: check_supported(name, spec) for name, spec in layers.items()}
    windows = {
        name: None
        if not limits.stores_windows or name in shared
        else get_window(spec, limits.max_model_len)
        for name, spec in dense.items()
    }
    context = limits.max_model_len
    # What only our own ops can compute.
    for name, spec in () if limits.own_ops else dense.items():
        width = get_window(spec, context)
        if width is not None and not limits.stores_windows:
            raise SPECULATION_WINDOWS.refusal(f"layer {name} with a window of {width}")
        if isinstance(spec, ChunkedLocalAttentionSpec) and spec.attention_chunk_size < context:
            raise CHUNKED_ATTENTION.refusal(f"layer {name}")
        if spec.head_size_v not in (0, spec.head_size):
            sizes = f"{spec.head_size} and {spec.head_size_v}"
            raise UNEQUAL_HEADS.refusal(f"layer {name} with heads of {sizes}")
    if any(windows.values()) and not limits.hybrid:
        raise ConfigError(
            "sliding-window layers keep one block per request, which needs vLLM's hybrid KV cache "
            "manager: drop --disable-hybrid-kv-cache-manager"
        )
    # Pages divide every window where chunks may start inside one: otherwise a step that slides
    # through a window would never hold the first page whole.
    page_tokens = math.gcd(limits.unit, *(window for window in windows.values() if window))
    if limits.unit >= limits.chunk_tokens or page_tokens < SMALLEST_PAGE:
        page_tokens = limits.unit
    # The bytes of a token in all layers, by window size.
    token_bytes: dict[int, int] = defaultdict(int)
    for name, window in windows.items():
        if window is not None:
            token_bytes[window] += bytes_per_token(dense[name])
    pages = {
        window: log_pages(
            window=window,
            unit=page_tokens,
            max_model_len=context,
            max_num_seqs=limits.max_num_seqs,
            chunk_tokens=limits.chunk_tokens,
            max_bytes=limits.log_bytes // len(token_bytes),
            token_bytes=all_layers,
            wanted_tokens=limits.log_tokens,
        )
        for window, all_layers in token_bytes.items()
    }
    # A group of windows has a pool of its own beside paged layers.
    own_blocks = limits.max_num_seqs + 1 if None in windows.values() else 0
    planned: dict[str, LayerSpec] = {}
    for name, spec in dense.items():
        window = windows[name]
        common: dict[str, Any] = {
            "block_size": limits.block_size,
            "num_kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
            "dtype": spec.dtype,
        }
        if window is None:
            is_latent = isinstance(spec, MLAAttentionSpec)
            planned[name] = PagedSpec(**common, head_size_v=0 if is_latent else spec.head_size)
        elif limits.appends_windows:
            planned[name] = AppendedWindowSpec(**common, sliding_window=window)
        else:
            planned[name] = WindowSpec(
                **common,
                window=window,
                own_blocks=own_blocks,
                log_pages=pages[window],
                page_tokens=page_tokens,
            )
    return planned


def window_bytes(specs: Iterable[KVCacheSpec], max_num_seqs: int) -> int:
    return sum(
        bytes_per_token(spec)
        * ((max_num_seqs + 1) * spec.window + spec.log_pages * spec.page_tokens)
        for spec in specs
        if isinstance(spec, WindowSpec)
    )


def get_reuse_unit(specs: Iterable[KVCacheSpec], unit: int) -> int:
    """Return the tokens at whose multiples prefixes can be reused: a log page, else ``unit``."""
    return next((spec.page_tokens for spec in specs if isinstance(spec, WindowSpec)), unit)


def paged_bytes_per_block(specs: Iterable[KVCacheSpec]) -> int:
    """Return the bytes of one block in all paged layers; 0 if there are none.

    Where some of them are windows, vLLM's pool needs less: groups of layers share its memory.
    """
    paged = (PagedSpec, AppendedWindowSpec)
    return sum(spec.page_size_bytes for spec in specs if isinstance(spec, paged))
