"""The KV cache tensors of one rank: allocation, binding to attention layers, copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rbln_backend.emulator.memory import zeros_on_demand
from rbln_backend.kv_cache.layout import kv_cache_shape
from rbln_backend.kv_cache.specs import PagedSpec, WindowSpec, layer_specs
from rbln_backend.kv_cache.transfers import WindowTransfers
from rbln_backend.kv_cache.window_tensors import WindowLayer
from rbln_backend.vllm_compat.surface import KVCacheConfig


@dataclass(frozen=True)
class KvCaches:
    """By layer name [num_blocks, 2, Hkv, 1, block_size, D] each; a window is a block's size.

    ``kv_outermost``: [2, num_blocks, ...] instead, as the custom-kernel ops want it.
    """

    tensors: Mapping[str, Tensor]
    paged: Sequence[Tensor]
    """The caches of full-attention layers, blocks first."""
    windows: Mapping[int, Sequence[WindowLayer]]
    """The window layers by KV cache group."""

    @classmethod
    def allocate(cls, config: KVCacheConfig, *, kv_outermost: bool) -> KvCaches:
        """Zeroed caches; the operating system lends their memory on first use."""
        tensors: dict[str, Tensor] = {}
        paged: list[Tensor] = []
        windows: dict[int, list[WindowLayer]] = {}
        for index, group in enumerate(config.kv_cache_groups):
            for name, spec in layer_specs(group.kv_cache_spec, group.layer_names).items():
                cache = _allocate(spec, config.num_blocks, kv_outermost)
                tensors[name] = cache.transpose(0, 1) if kv_outermost else cache
                if isinstance(spec, WindowSpec):
                    windows.setdefault(index, []).append(WindowLayer.over(cache, spec))
                else:
                    paged.append(cache)
        return cls(tensors, paged, windows)

    @property
    def num_bytes(self) -> int:
        caches = [cache.nbytes for cache in self.tensors.values()]
        logs = [layer.log.nbytes for layers in self.windows.values() for layer in layers]
        return sum(caches) + sum(logs)

    def bind(self, layers: Mapping[str, Any]) -> None:
        """Give each attention layer its cache, where the traced forward reads it."""
        for layer_name, cache in self.tensors.items():
            layers[layer_name].kv_cache = cache

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks ``(source, destination)`` in every full-attention layer."""
        sources = torch.tensor([source for source, _ in copies])
        destinations = torch.tensor([destination for _, destination in copies])
        for cache in self.paged:
            cache[destinations] = cache[sources]

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Clear freshly allocated blocks that vLLM wants clean."""
        index = torch.tensor(block_ids)
        for cache in self.paged:
            cache[index] = 0

    def restore_windows(self, transfers: WindowTransfers) -> None:
        """Fill window blocks from the log, before a step."""
        for restore in transfers.restores:
            for layer in self.windows.get(restore.group, ()):
                layer.restore(restore)

    def store_windows(self, transfers: WindowTransfers) -> None:
        """Log the pages that a step completed, after it."""
        for store in transfers.stores:
            for layer in self.windows.get(store.group, ()):
                layer.store(store)


def _allocate(spec: PagedSpec | WindowSpec, num_blocks: int, kv_outermost: bool) -> Tensor:
    """Blocks first, whatever the order in memory."""
    if isinstance(spec, WindowSpec):
        blocks, block_size = spec.own_blocks or num_blocks, spec.window
    else:
        blocks, block_size = num_blocks, spec.block_size
    shape = kv_cache_shape(blocks, spec.num_kv_heads, block_size, spec.head_size)
    if kv_outermost:
        return zeros_on_demand((shape[1], shape[0], *shape[2:]), spec.dtype).transpose(0, 1)
    return zeros_on_demand(shape, spec.dtype)
