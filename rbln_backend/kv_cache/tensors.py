"""The KV cache tensors of one rank: allocation, sharing between layers, and copies of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from vllm.v1.kv_cache_interface import KVCacheConfig

from rbln_backend.core import HeadCopy, PageMove, WindowTransfers
from rbln_backend.kv_cache.fp8 import log_scales, share_scales
from rbln_backend.kv_cache.layout import kv_cache_shape
from rbln_backend.kv_cache.specs import LayerSpec, WindowSpec, get_parts, layer_specs

if TYPE_CHECKING:
    from rbln_backend.devices.port import KvMemory


class LoggedWindow(NamedTuple):
    """The window blocks and the prefix log of one layer, each with K and V."""

    cache: Tensor
    """[num_blocks, 2, Hkv, 1, window, D]."""
    log: Tensor
    """[num_pages, 2, Hkv, 1, page_tokens, D]."""


@dataclass(frozen=True)
class KvCaches:
    """KV caches [num_blocks, 2, Hkv, 1, block_size, D] by layer name.

    The block of a window layer is its window. With ``kv_outermost`` they are
    [2, num_blocks, ...], as the custom-kernel ops require.
    """

    memory: KvMemory
    tensors: Mapping[str, Tensor]
    windows: Mapping[int, Sequence[LoggedWindow]]
    """The window layers with a log, by KV cache group."""
    groups: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    """Tensors to copy by KV cache group: the caches [num_blocks, ...] of layers in pages, and the
    window layers' logs [num_pages, ...]."""

    @classmethod
    def allocate(
        cls, config: KVCacheConfig, memory: KvMemory, *, kv_outermost: bool = False
    ) -> KvCaches:
        """Allocate caches in the device's ``memory``. Layers of several groups may share one.

        vLLM overlays the groups of its pool: a block belongs to one group at a time.
        """
        tensors: dict[str, Tensor] = {}
        paged: dict[int, Tensor] = {}
        windows: dict[int, list[LoggedWindow]] = {}
        groups: dict[int, list[Tensor]] = {}
        places = _places(config)
        for index, group in enumerate(config.kv_cache_groups):
            for name, spec in layer_specs(group.kv_cache_spec, group.layer_names).items():
                cache = None if isinstance(spec, WindowSpec) else paged.get(places[name])
                if cache is None:
                    cache = _allocate(memory, name, spec, config.num_blocks, kv_outermost)
                tensors[name] = cache.transpose(0, 1) if kv_outermost else cache
                if not isinstance(spec, WindowSpec):
                    paged[places[name]] = cache
                    groups.setdefault(index, []).append(cache)
                elif spec.log_pages:
                    heads, size = spec.num_kv_heads, spec.head_size
                    shape = kv_cache_shape(spec.log_pages, heads, spec.page_tokens, size)
                    log = memory.allocate(f"{name}.log", shape, spec.dtype)
                    windows.setdefault(index, []).append(LoggedWindow(cache, log))
                    groups.setdefault(index, []).append(log)
        return cls(memory, tensors, windows, groups)

    @property
    def num_bytes(self) -> int:
        caches = {id(cache): cache.nbytes for cache in self.tensors.values()}
        logs = [layer.log.nbytes for layers in self.windows.values() for layer in layers]
        return sum(caches.values()) + sum(logs)

    def bind(self, layers: Mapping[str, Any]) -> None:
        """Set ``kv_cache`` of each attention layer, where the traced forward reads it."""
        sharing = sharing_layers(layers)
        for name, layer in layers.items():
            owner = sharing.get(name, name)
            if owner in self.tensors:
                layer.kv_cache = self.tensors[owner]
                if owner != name:
                    share_scales(layer, layers[owner])
        log_scales(layers)

    def copy_heads(self, copies: Sequence[HeadCopy]) -> None:
        """Copy the first tokens of blocks in the layers of their groups. Called before a step."""
        for group in dict.fromkeys(copy.group for copy in copies):
            # A stage of a pipeline may have no layer of a group.
            if caches := self.groups.get(group):
                self.memory.copy_heads(caches, [copy for copy in copies if copy.group == group])

    def load_pages(self, moves: Sequence[PageMove]) -> None:
        """Copy pages of host memory into their blocks. Called before a step."""
        for move in moves:
            for cache, block, slot, part in self._parts(move):
                self.memory.write_tokens(cache, block, slot, part)

    def store_pages(self, moves: Sequence[PageMove]) -> None:
        """Copy pages from their blocks into host memory. Called after a step."""
        for move in moves:
            for cache, block, slot, part in self._parts(move):
                self.memory.read_tokens(cache, block, slot, part)

    def _parts(self, move: PageMove) -> Iterator[tuple[Tensor, int, int, Tensor]]:
        """Yield cache, block, slot and the layer's part [..., tokens, D] of the page."""
        start = 0
        for group, block, slot, tokens in move.parts:
            for cache in self.groups[group]:
                end = start + _token_bytes(cache) * tokens
                part = move.page[start:end].view(cache.dtype)
                yield cache, block, slot, part.view(*cache.shape[1:-2], tokens, cache.shape[-1])
                start = end

    def restore_windows(self, transfers: WindowTransfers) -> None:
        """Fill window blocks from the log. Called before a step."""
        for restore in transfers.restores:
            for layer in self.windows.get(restore.group, ()):
                self.memory.restore_window(layer.cache, layer.log, restore)

    def store_windows(self, transfers: WindowTransfers) -> None:
        """Copy the pages that a step completed to the log. Called after the step."""
        for store in transfers.stores:
            for layer in self.windows.get(store.group, ()):
                self.memory.store_window(layer.cache, layer.log, store)


def _token_bytes(cache: Tensor) -> int:
    """Return the bytes of one token in a cache [num_blocks, ..., block_size, D]."""
    return math.prod(cache.shape[1:-2]) * cache.shape[-1] * cache.itemsize


def sharing_layers(layers: Mapping[str, Any]) -> dict[str, str]:
    """Return, by name, the layers that read the cache of another, and the name of its owner."""
    targets = {
        name: getattr(layer, "kv_sharing_target_layer_name", None) for name, layer in layers.items()
    }
    return {name: target for name, target in targets.items() if target is not None}


def _places(config: KVCacheConfig) -> Mapping[str, int]:
    """Return each layer's offset in vLLM's pool; layers of equal offsets share their memory."""
    return {
        name: tensor.offset + position * tensor.layer_stride
        for tensor in config.kv_cache_tensors
        for position, name in enumerate(tensor.layers)
    }


def _allocate(
    memory: KvMemory, name: str, spec: LayerSpec, num_blocks: int, kv_outermost: bool
) -> Tensor:
    """Return a cache [num_blocks, ...]; ``kv_outermost`` is its order in memory."""
    if isinstance(spec, WindowSpec):
        blocks, block_size = spec.own_blocks or num_blocks, spec.window
    else:
        blocks, block_size = num_blocks, spec.block_size
    sizes = (blocks, spec.num_kv_heads, block_size, spec.head_size)
    shape = kv_cache_shape(*sizes, parts=get_parts(spec))
    if kv_outermost:
        outermost = (shape[1], shape[0], *shape[2:])
        return memory.allocate(name, outermost, spec.dtype).transpose(0, 1)
    return memory.allocate(name, shape, spec.dtype)
