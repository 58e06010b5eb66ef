"""The KV cache tensors of one rank: allocation, binding to attention layers, block copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.kv_cache.layout import kv_cache_shape
from rbln_backend.vllm_compat.surface import FullAttentionSpec, KVCacheConfig


@dataclass(frozen=True)
class KvCaches:
    """By layer name [num_blocks, 2, Hkv, 1, block_size, D] each.

    ``kv_outermost``: [2, num_blocks, ...] instead, as the custom-kernel ops want it.
    """

    tensors: Mapping[str, Tensor]
    kv_outermost: bool

    @classmethod
    def allocate(cls, config: KVCacheConfig, *, kv_outermost: bool) -> KvCaches:
        """Zeroed caches; the operating system lends their pages on first use.

        Raises ``UnsupportedModelError`` for a cache kind without an op.
        """
        tensors: dict[str, Tensor] = {}
        for group in config.kv_cache_groups:
            spec = group.kv_cache_spec
            if not isinstance(spec, FullAttentionSpec):
                raise UnsupportedModelError(
                    f"KV cache kind {type(spec).__name__} is not supported by the RBLN backend"
                )
            shape = kv_cache_shape(
                config.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size
            )
            if kv_outermost:
                shape = (shape[1], shape[0], *shape[2:])
            for layer_name in group.layer_names:
                tensors[layer_name] = torch.zeros(shape, dtype=spec.dtype)
        return cls(tensors, kv_outermost)

    @property
    def num_bytes(self) -> int:
        return sum(cache.numel() * cache.element_size() for cache in self.tensors.values())

    def bind(self, layers: Mapping[str, Any]) -> None:
        """Give each attention layer its cache, where the traced forward reads it."""
        for layer_name, cache in self.tensors.items():
            layers[layer_name].kv_cache = cache

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks ``(source, destination)`` in every layer."""
        sources = torch.tensor([source for source, _ in copies])
        destinations = torch.tensor([destination for _, destination in copies])
        for cache in self._blocks_first():
            cache[destinations] = cache[sources]

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Clear freshly allocated blocks that vLLM wants clean."""
        index = torch.tensor(block_ids)
        for cache in self._blocks_first():
            cache[index] = 0

    def _blocks_first(self) -> Iterator[Tensor]:
        for cache in self.tensors.values():
            yield cache.transpose(0, 1) if self.kv_outermost else cache
