"""The window blocks and the prefix log of one sliding-window layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rbln_backend.emulator.memory import zeros_on_demand
from rbln_backend.kv_cache.layout import kv_cache_shape
from rbln_backend.kv_cache.specs import WindowSpec
from rbln_backend.kv_cache.transfers import WindowRestore, WindowStore


@dataclass(frozen=True)
class WindowLayer:
    """Copies between a layer's window blocks and its log; both hold K and V of whole tokens."""

    cache: Tensor
    """[num_blocks, 2, Hkv, 1, window, D]."""
    log: Tensor
    """[num_pages, 2, Hkv, 1, page_tokens, D]."""

    @classmethod
    def over(cls, cache: Tensor, spec: WindowSpec) -> WindowLayer:
        """With a zeroed log; its memory is taken as pages are written."""
        shape = kv_cache_shape(spec.log_pages, spec.num_kv_heads, spec.page_tokens, spec.head_size)
        return cls(cache, zeros_on_demand(shape, spec.dtype))

    def restore(self, move: WindowRestore) -> None:
        """The last ``window`` tokens before ``move.num_tokens`` go to the block, left-aligned."""
        held = min(move.num_tokens, self.cache.shape[4])
        # [2, Hkv, 1, pages, page_tokens, D] -> [2, Hkv, 1, tokens, D]
        tokens = self.log[list(move.pages)].movedim(0, 3).flatten(3, 4)
        self.cache[move.block, :, :, :, :held] = tokens[:, :, :, -held:]

    def store(self, move: WindowStore) -> None:
        """One page of tokens from ``move.slot`` of the block on goes to the log."""
        end = move.slot + self.log.shape[4]
        self.log[move.page] = self.cache[move.block, :, :, :, move.slot : end]
