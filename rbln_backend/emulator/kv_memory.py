"""KV caches in this host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rbln_backend.emulator.memory import reserve_pages, zeros_on_demand
from rbln_backend.errors import DeviceMemoryError

if TYPE_CHECKING:
    from rbln_backend.core import HeadCopy, WindowRestore, WindowStore


class HostKvMemory:
    """See ``KvMemory``: graphs share caches by being given the tensors."""

    def __init__(self, *, reserved: bool = False) -> None:
        """Pages of caches are mapped on first use, or, if ``reserved``, by ``allocate``."""
        self._reserved = reserved

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros of ``shape`` [...].

        Raises ``DeviceMemoryError`` if the system has too little memory.
        """
        try:
            cache = zeros_on_demand(tuple(shape), dtype)
            if self._reserved and cache.nbytes:
                reserve_pages(cache)
        except DeviceMemoryError as error:
            pages = "reserved" if self._reserved else "on_demand"
            raise DeviceMemoryError(
                f"kv_cache_pages={pages}: KV cache of {name}: {error}; lower "
                "--kv-cache-memory-bytes or --max-num-seqs"
            ) from error
        return cache

    def copy_heads(self, caches: Sequence[Tensor], copies: Sequence[HeadCopy]) -> None:
        """As ``KvMemory``: caches [num_blocks, 2, Hkv, 1, block_size, D]."""
        for cache in caches:
            for source, target, _, tokens in copies:
                cache[target, ..., :tokens, :] = cache[source, ..., :tokens, :]

    def read_tokens(self, cache: Tensor, block: int, slot: int, page: Tensor) -> None:
        """As ``KvMemory``: cache [num_blocks, ...], page [2, Hkv, 1, tokens, D]."""
        page.copy_(cache[block, :, :, :, slot : slot + page.shape[3]])

    def write_tokens(self, cache: Tensor, block: int, slot: int, page: Tensor) -> None:
        """As ``KvMemory``: cache [num_blocks, ...], page [2, Hkv, 1, tokens, D]."""
        cache[block, :, :, :, slot : slot + page.shape[3]].copy_(page)

    def shared_blocks(self, cache: Tensor) -> Tensor:
        """Return ``cache`` [num_blocks, ...]."""
        return cache

    def restore_window(self, cache: Tensor, log: Tensor, move: WindowRestore) -> None:
        """As ``KvMemory``: cache [num_blocks, 2, Hkv, 1, window, D], log [num_pages, ...]."""
        held = min(move.num_tokens, cache.shape[4])
        # [2, Hkv, 1, pages, page_tokens, D] -> [2, Hkv, 1, tokens, D]
        tokens = log[list(move.pages)].movedim(0, 3).flatten(3, 4)
        cache[move.block, :, :, :, :held] = tokens[:, :, :, -held:]

    def store_window(self, cache: Tensor, log: Tensor, move: WindowStore) -> None:
        """As ``KvMemory``: cache [num_blocks, 2, Hkv, 1, window, D], log [num_pages, ...]."""
        end = move.slot + log.shape[4]
        log[move.page] = cache[move.block, :, :, :, move.slot : end]
