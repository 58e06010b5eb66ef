"""Tokens and bytes of a page, which covers the same tokens of all layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rbln_backend.kv_cache.specs import PagedSpec, layer_specs, parts_of
from rbln_backend.vllm_compat.surface import KVCacheConfig

# A file per page: larger ones waste the end of a prefix, smaller ones cost more than they save.
_WANTED_TOKENS = 128


@dataclass(frozen=True)
class PageLayout:
    """Size of a page."""

    tokens: int
    num_bytes: int

    @classmethod
    def of(cls, config: KVCacheConfig, unit: int, block_sizes: Sequence[int]) -> PageLayout:
        """Return the layout for prefixes that are reused in units of ``unit`` tokens.

        A page lies within one block: it divides all ``block_sizes``.
        """
        block = math.gcd(*block_sizes)
        sizes = [n for n in range(unit, block + 1, unit) if block % n == 0]
        tokens = max((n for n in sizes if n <= _WANTED_TOKENS), default=sizes[0])
        token_bytes = 0
        for group in config.kv_cache_groups:
            specs = layer_specs(group.kv_cache_spec, group.layer_names)
            for spec in specs.values():
                assert isinstance(spec, PagedSpec), "windows are refused"
                sizes_of_token = (parts_of(spec), spec.num_kv_heads, spec.head_size)
                token_bytes += math.prod(sizes_of_token) * spec.dtype.itemsize
        return cls(tokens, tokens * token_bytes)
