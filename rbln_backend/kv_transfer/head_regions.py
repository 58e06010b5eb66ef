"""Keys and values of a layer as two regions of memory, so that ranks can read some of the heads.

A block of a layer is [2, Hkv, 1, block_size, D]: heads are contiguous within its keys and within
its values, but not within the block. vLLM's connector divides a block of a region by heads where
two servers have different tensor-parallel sizes. A layer of latent attention is one region: it
caches values within keys, which each rank has whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from rbln_backend.kv_cache.specs import PagedSpec, layer_specs, parts_of
from rbln_backend.vllm_compat.surface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs

_PARTS = ("keys", "values")
_LATENT_RANK = 3
"""Dimensions of a cache of latent attention on an NPU."""


def with_head_regions(config: KVCacheConfig) -> KVCacheConfig:
    """Return ``config`` with two layers, of half the block each, in place of every layer.

    ``LAYER.keys`` and ``LAYER.values`` are the names, in the order of blocks' memory. Of latent
    attention there are keys alone.
    """
    groups = []
    for group in config.kv_cache_groups:
        specs = layer_specs(group.kv_cache_spec, group.layer_names)
        halves = {
            f"{name}.{part}": _half(spec)
            for name, spec in specs.items()
            for part in _PARTS[: parts_of(spec)]
        }
        spec: KVCacheSpec = next(iter(halves.values()))
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            spec = dataclasses.replace(group.kv_cache_spec, kv_cache_specs=dict(halves))
        groups.append(dataclasses.replace(group, layer_names=[*halves], kv_cache_spec=spec))
    return dataclasses.replace(config, kv_cache_groups=groups)


def head_regions(caches: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of the layers of ``with_head_regions``.

    ``caches``: [num_blocks, 2, Hkv, 1, block_size, D] by layer name; the views lack the second
    dimension. Caches of latent attention have 1 in its place or, on an NPU, are
    [num_blocks, block_size, D].
    """
    regions: dict[str, Tensor] = {}
    for name, cache in caches.items():
        parts = [cache] if cache.dim() == _LATENT_RANK else cache.unbind(1)
        regions |= {f"{name}.{part}": view for part, view in zip(_PARTS, parts, strict=False)}
    return regions


def _half(spec: KVCacheSpec) -> PagedSpec:
    assert isinstance(spec, PagedSpec), "checked by check_cached_layers"
    return dataclasses.replace(spec, head_size_v=0)
