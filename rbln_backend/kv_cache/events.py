"""KV cache events: report the whole blocks that the paged groups hold, for prefix-aware routers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rbln_backend.kv_cache.group_managers import PagedManager
from rbln_backend.vllm_compat.surface import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    Request,
)

_Name = tuple[int | None, bytes | int]
"""A KV cache group and the hash of a block, as events have them."""


class BlockEvents:
    """Reports of reused blocks, and a filter that makes removals match what was stored.

    Upstream reports two removals too many: that of a block's head, which was never reported as
    stored, and that of a block whose tokens another block still holds.
    """

    def __init__(self, pool: BlockPool, groups: Sequence[PagedManager]) -> None:
        self._pool, self._groups = pool, groups
        self._held: Counter[_Name] = Counter()
        self._reused: list[KVCacheEvent] = []

    def report_reuse(self, request: Request, num_tokens: int) -> None:
        """Queue the whole blocks among the ``num_tokens`` that an admitted request reuses.

        Only for requests with ``kv_cache_report_mode`` "full".
        """
        enabled = self._pool.enable_kv_cache_events
        if not enabled or getattr(request, "kv_cache_report_mode", None) != "full":
            return
        for group in self._groups:
            size = group.block_size
            if num_tokens >= size:
                self._pool.emit_cached_block_events(
                    request, num_tokens // size, size, group.kv_cache_group_id
                )
                self._reused.append(self._pool.kv_event_queue[-1])

    def filter(self, events: Sequence[KVCacheEvent]) -> list[KVCacheEvent]:
        """Return the events of a step without removals of blocks still held or never stored."""
        reused, self._reused = self._reused, []
        return [event for event in events if self._is_change(event, reused)]

    def _is_change(self, event: KVCacheEvent, reused: Sequence[KVCacheEvent]) -> bool:
        if isinstance(event, AllBlocksCleared):
            self._held.clear()
        elif isinstance(event, BlockStored):
            if not any(event is report for report in reused):
                self._held.update(_names(event))
        elif isinstance(event, BlockRemoved):
            last = [self._drop(name) for name in _names(event)]
            return all(last)
        return True

    def _drop(self, name: _Name) -> bool:
        """Count a removal; return True for that of the last block with these tokens."""
        if name not in self._held:
            return False
        self._held[name] -= 1
        if self._held[name]:
            return False
        del self._held[name]
        return True


def _names(event: BlockStored | BlockRemoved) -> Iterator[_Name]:
    return ((event.group_idx, block_hash) for block_hash in event.block_hashes)
