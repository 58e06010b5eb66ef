"""Keys and values of a layer as two regions of memory, so that ranks can read some of the heads.

A block of a layer is [2, Hkv, 1, block_size, D]: heads are contiguous within its keys and within
its values, but not within the block. vLLM's connector divides a block of a region by heads where
two servers have different tensor-parallel sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from rbln_backend.kv_cache.specs import PagedSpec, layer_specs
from rbln_backend.vllm_compat.surface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs

_PARTS = ("keys", "values")


def with_head_regions(config: KVCacheConfig) -> KVCacheConfig:
    """Return ``config`` with two layers, of half the block each, in place of every layer.

    ``LAYER.keys`` and ``LAYER.values`` are the names, in the order of blocks' memory.
    """
    groups = []
    for group in config.kv_cache_groups:
        specs = layer_specs(group.kv_cache_spec, group.layer_names)
        halves = {f"{name}.{part}": _half(spec) for name, spec in specs.items() for part in _PARTS}
        spec: KVCacheSpec = next(iter(halves.values()))
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            spec = dataclasses.replace(group.kv_cache_spec, kv_cache_specs=dict(halves))
        groups.append(dataclasses.replace(group, layer_names=[*halves], kv_cache_spec=spec))
    return dataclasses.replace(config, kv_cache_groups=groups)


def head_regions(caches: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of the layers of ``with_head_regions``.

    ``caches``: [num_blocks, 2, Hkv, 1, block_size, D] by layer name; the views lack the second
    dimension.
    """
    return {
        f"{name}.{part}": cache[:, index]
        for name, cache in caches.items()
        for index, part in enumerate(_PARTS)
    }


def _half(spec: KVCacheSpec) -> PagedSpec:
    assert isinstance(spec, PagedSpec), "checked by check_cached_layers"
    return dataclasses.replace(spec, head_size_v=0)
