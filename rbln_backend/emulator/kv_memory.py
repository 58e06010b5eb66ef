"""KV caches in this host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rbln_backend.emulator.memory import zeros_on_demand

if TYPE_CHECKING:
    from rbln_backend.kv_cache.transfers import WindowRestore, WindowStore


class HostKvMemory:
    """See ``KvMemory``: graphs share caches by being given the tensors."""

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """Return zeros of ``shape`` [...]; the operating system maps their memory on first use."""
        return zeros_on_demand(tuple(shape), dtype)

    def copy_blocks(self, caches: Sequence[Tensor], copies: Sequence[tuple[int, int]]) -> None:
        """As ``KvMemory``: caches [num_blocks, ...]."""
        sources = torch.tensor([source for source, _ in copies])
        destinations = torch.tensor([destination for _, destination in copies])
        for cache in caches:
            cache[destinations] = cache[sources]

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
