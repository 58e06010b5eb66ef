"""KV cache events: what changed in a step, in units at which a prefix can be reused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rbln_backend.kv_cache.coordinator import RblnKvCoordinator
from rbln_backend.kv_cache.layout import page_span
from rbln_backend.kv_cache.unit_events import report_stored, units_of
from rbln_backend.vllm_compat.surface import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    Request,
)

_Name = tuple[int | None, bytes | int]
"""A KV cache group and the hash of a unit, as events have them."""
_Change = BlockStored | BlockRemoved | AllBlocksCleared


class BlockEvents:
    """Net changes of the units that can be reused, for prefix-aware routers.

    The managers queue every registration of a unit, and upstream every removal. Several blocks may
    hold the same tokens, and a block that fills up is registered anew. A router gets one event when
    a unit can be reused and one when it no longer can.
    """

    def __init__(self, coordinator: RblnKvCoordinator) -> None:
        self._pool, self._paged = coordinator.block_pool, coordinator.paged
        logged = [(m.log.window, m.kv_cache_group_id) for m in coordinator.windows]
        appended = [(m.sliding_window, m.kv_cache_group_id) for m in coordinator.appended]
        self._windows = logged + appended
        self._held: Counter[_Name] = Counter()
        self._reused: list[KVCacheEvent] = []

    def report_reuse(self, request: Request, num_tokens: int) -> None:
        """Queue the ``num_tokens``, whole units, that an admitted request reuses.

        Only for requests with ``kv_cache_report_mode`` "full".
        """
        enabled = self._pool.enable_kv_cache_events
        if not enabled or getattr(request, "kv_cache_report_mode", None) != "full":
            return
        queue, unit = self._pool.kv_event_queue, self._pool.hash_block_size
        begin = len(queue)
        for group in self._paged:
            report_stored(self._pool, request, 0, num_tokens // unit, group.kv_cache_group_id)
        for window, number in self._windows:
            report_stored(self._pool, request, *page_span(num_tokens, window, unit), number)
        self._reused += queue[begin:]

    def filter(self, events: Sequence[KVCacheEvent]) -> list[_Change]:
        """Return what the ``events`` of a step changed: removals, reuse reports, stored units."""
        reused, self._reused = self._reused, []
        was_held: dict[_Name, bool] = {}
        changes: list[_Change] = []
        reports: list[BlockStored] = []
        stored: list[BlockStored] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                changes = [event]
                for record in (self._held, was_held, reports, stored):
                    record.clear()
            elif isinstance(event, BlockRemoved):
                self._count(event, -1, was_held)
            elif isinstance(event, BlockStored):
                if any(event is report for report in reused):
                    reports.append(event)
                # Upstream's events of whole blocks repeat what ``PagedManager`` reports by unit.
                elif event.block_size == self._pool.hash_block_size:
                    self._count(event, 1, was_held)
                    stored.append(event)
        gone = [name for name, held in was_held.items() if held and name not in self._held]
        fresh = {name for name, held in was_held.items() if not held and name in self._held}
        changes += self._removed(gone)
        changes += _parts(reports, lambda name: name in self._held)
        changes += _parts(stored, lambda name: _take(fresh, name))
        return changes

    def _count(
        self, event: BlockStored | BlockRemoved, change: int, was_held: dict[_Name, bool]
    ) -> None:
        """Add to the blocks that hold the units of ``event``; note in ``was_held`` those before."""
        for name in _names(event):
            was_held.setdefault(name, name in self._held)
            self._held[name] += change
            if self._held[name] <= 0:
                del self._held[name]

    def _removed(self, names: list[_Name]) -> Iterator[BlockRemoved]:
        """Return one event for each group."""
        for group in dict.fromkeys(group for group, _ in names):
            hashes = [block_hash for owner, block_hash in names if owner == group]
            yield BlockRemoved(block_hashes=hashes, medium=self._pool.medium, group_idx=group)


def _parts(
    events: Sequence[BlockStored], is_wanted: Callable[[_Name], bool]
) -> Iterator[BlockStored]:
    """Return the runs of wanted units of ``events``."""
    for event in events:
        first = 0
        for wanted, run in groupby([is_wanted(name) for name in _names(event)]):
            end = first + len(list(run))
            if wanted:
                yield units_of(event, first, end)
            first = end


def _take(names: set[_Name], name: _Name) -> bool:
    """Remove ``name`` from ``names``; return whether it was there."""
    if name not in names:
        return False
    names.remove(name)
    return True


def _names(event: BlockStored | BlockRemoved) -> Iterator[_Name]:
    return ((event.group_idx, block_hash) for block_hash in event.block_hashes)
