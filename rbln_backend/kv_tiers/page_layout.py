"""Tokens and bytes of pages: one with all paged layers, and one for each group of windows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rbln_backend.kv_cache.specs import WindowSpec, any_layer_spec, layer_specs, parts_of
from rbln_backend.vllm_compat.surface import KVCacheConfig

# A file per page: larger ones waste the end of a prefix, smaller ones cost more than they save.
_WANTED_TOKENS = 128


@dataclass(frozen=True)
class PageLayout:
    """Sizes of pages, which all cover the same tokens."""

    tokens: int
    num_bytes: int
    """Of a page of all paged layers."""
    window_bytes: Mapping[int, int]
    """Of a page of each window group, by number of the group."""

    @classmethod
    def of(cls, config: KVCacheConfig, unit: int, block_sizes: Sequence[int]) -> PageLayout:
        """Return the layout for prefixes that are reused in units of ``unit`` tokens.

        A page lies within one block: it divides all ``block_sizes``.
        """
        block = math.gcd(*block_sizes)
        sizes = [n for n in range(unit, block + 1, unit) if block % n == 0]
        tokens = max((n for n in sizes if n <= _WANTED_TOKENS), default=sizes[0])
        paged, windows = 0, dict[int, int]()
        for index, group in enumerate(config.kv_cache_groups):
            specs = layer_specs(group.kv_cache_spec, group.layer_names).values()
            sizes_of_token = [(parts_of(x), x.num_kv_heads, x.head_size) for x in specs]
            itemsize = any_layer_spec(group.kv_cache_spec).dtype.itemsize
            group_bytes = tokens * itemsize * sum(map(math.prod, sizes_of_token))
            if isinstance(any_layer_spec(group.kv_cache_spec), WindowSpec):
                windows[index] = group_bytes
            else:
                paged += group_bytes
        return cls(tokens, paged, windows)
