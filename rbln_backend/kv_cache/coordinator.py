"""vLLM's KV cache manager: prefix hits finer than a block, and events of these units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheSpecKind
from vllm.v1.request import Request

from rbln_backend.core import HeadCopy, WindowTransfers
from rbln_backend.kv_cache.layout import page_span
from rbln_backend.kv_cache.managers import (
    AppendedWindowManager,
    HeadSharingManager,
    PagedManager,
    WindowManager,
    get_units,
    report_stored,
)

Blocks = tuple[list[KVCacheBlock], ...]


class RblnKvCoordinator(KVCacheCoordinator):
    """vLLM's coordinator with hits that end at any multiple of ``hash_block_size`` tokens.

    A hit ends where every group can resume: paged groups share blocks and copy the head of the
    last one, windows in pages those that the window reaches, and window groups refill a window
    block from their log.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        managers = self.single_type_managers
        self.paged = [m for m in managers if isinstance(m, PagedManager)]
        self.windows = [m for m in managers if isinstance(m, WindowManager)]
        self.appended = [m for m in managers if isinstance(m, AppendedWindowManager)]
        self._enable_caching = bool(options["enable_caching"])
        self.hit_tokens: dict[str, int] = {}
        """Tokens that prefix hits saved, by kind of hit: ``block`` and ``sub_block``, or ``window``
        for a model with window layers alone. Whoever counts them clears it."""
        self.unwritten: set[BlockHash] = set()
        """Prefixes that the step being scheduled computes: no hits in the same step. Heads of
        blocks and windows are copied before a step, and logged after it."""
        self.on_cached: Callable[[Request, int], None] | None = None
        """Called with a request and its tokens whose KV is in the cache after the step."""

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[Blocks, int, int]:
        """Return blocks (paged) or log pages (window) per group, the hit in tokens, and 0.

        Log pages of the hit become the most recently used ones.
        """
        found, hit = self._find(block_hashes, max_cache_hit_length)
        if hit:
            for window in self.windows:
                pages = window.log.use(block_hashes, hit)
                found[window.kv_cache_group_id] = [KVCacheBlock(page) for page in pages]
        return tuple(found), hit, 0

    def peek_hit(self, block_hashes: list[BlockHash], max_tokens: int) -> int:
        """Return the hit in tokens, at most ``max_tokens``, without touching the eviction order."""
        return self._find(block_hashes, max_tokens)[1]

    def _find(
        self, block_hashes: list[BlockHash], max_tokens: int
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Return the blocks of paged groups by group, and the hit of all groups in tokens."""
        found: list[list[KVCacheBlock]] = [[] for _ in self.single_type_managers]
        if not self._enable_caching:
            return found, 0
        unit = self.block_pool.hash_block_size
        hashes = block_hashes[: max_tokens // unit]
        hit = len(hashes) * unit
        if self.unwritten:
            found_at = (n for n, prefix in enumerate(hashes) if prefix in self.unwritten)
            hit = next(found_at, len(hashes)) * unit
        for manager in self.paged:
            blocks, length = manager.find_longest_cache_hit(
                block_hashes=block_hashes,
                max_length=hit,
                kv_cache_group_ids=[manager.kv_cache_group_id],
                block_pool=self.block_pool,
                kv_cache_spec=manager.kv_cache_spec,
                drop_eagle_block=False,
                alignment_tokens=unit,
            )
            found[manager.kv_cache_group_id] = blocks[0]
            hit = min(hit, length)
        # The longest prefix that every window group can resume.
        previous = -1
        while hit != previous:
            previous = hit
            for window in self.windows:
                hit = window.log.longest(block_hashes, hit)
            for appended in self.appended:
                hit = appended.longest(block_hashes, hit)
        for manager in self.paged:
            del found[manager.kv_cache_group_id][-(-hit // manager.block_size) :]
        for appended in self.appended:
            found[appended.kv_cache_group_id] = appended.find(block_hashes, hit)
        return found, hit

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        super().cache_blocks(request, num_computed_tokens)
        if self.on_cached is not None:
            self.on_cached(request, num_computed_tokens)

    def emit_cached_block_events(self, request: Request, computed_blocks: Blocks) -> None:
        """Report nothing: a lookup admits no request, and its last block may be a shared head.

        ``RblnKvCacheManager`` reports the reused blocks of a request when it is admitted.
        """

    def most_blocks(self, num_decoding: int, prompts: Iterable[int]) -> int:
        """Return the most blocks of vLLM's pool that steps could take.

        That is one token of each of ``num_decoding`` running requests, which already own a window
        block, and all tokens of ``prompts``, given as numbers of tokens.
        """
        paged = [m for m in self.single_type_managers if m not in self.windows]
        blocks = num_decoding * len(paged)
        for tokens in prompts:
            blocks += sum(-(-tokens // manager.block_size) for manager in paged)
            blocks += sum(window.get_num_blocks_to_allocate("") for window in self.windows)
        return blocks

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        super().allocate_new_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        if any(new_computed_blocks):
            counts = self.hit_tokens
            in_blocks = (*self.paged, *self.appended)
            tokens = num_local_computed_tokens
            if in_blocks:
                in_head = tokens % in_blocks[0].block_size
                counts["sub_block"] = counts.get("sub_block", 0) + in_head
                counts["block"] = counts.get("block", 0) + tokens - in_head
            else:
                counts["window"] = counts.get("window", 0) + tokens

    def take_transfers(self) -> WindowTransfers:
        """Return the window transfers of the step just scheduled, and start collecting anew."""
        self.unwritten.clear()
        transfers = WindowTransfers()
        for window in self.windows:
            taken = window.take_transfers()
            transfers.restores += taken.restores
            transfers.stores += taken.stores
        return transfers

    def take_head_copies(self) -> list[HeadCopy]:
        """Return the copies of the step just scheduled, in the order of upstream's."""
        managers = self.single_type_managers
        sharing = (m for m in managers if isinstance(m, HeadSharingManager))
        return [copy for manager in sharing for copy in manager.take_head_copies()]

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        for window in self.windows:
            window.log.clear()
        return True


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
        for group in dict.fromkeys(group for group, _ in gone):
            hashes = [block_hash for owner, block_hash in gone if owner == group]
            medium = self._pool.medium
            changes.append(BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group))
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


def _parts(
    events: Sequence[BlockStored], is_wanted: Callable[[_Name], bool]
) -> Iterator[BlockStored]:
    """Return the runs of wanted units of ``events``."""
    for event in events:
        first = 0
        for wanted, run in groupby([is_wanted(name) for name in _names(event)]):
            end = first + len(list(run))
            if wanted:
                yield get_units(event, first, end)
            first = end


def _take(names: set[_Name], name: _Name) -> bool:
    if name not in names:
        return False
    names.remove(name)
    return True


def _names(event: BlockStored | BlockRemoved) -> Iterator[_Name]:
    return ((event.group_idx, block_hash) for block_hash in event.block_hashes)


# Options with which vLLM's scheduler allocates for a running request.
_RUNNING = {"num_lookahead_tokens": 0}
_WINDOW_KIND = KVCacheSpecKind.SLIDING_WINDOW.value
# All attributes of vLLM's manager. A new one in another release may refer to its coordinator.
_ATTRIBUTES = frozenset(
    """
    block_pool coordinator empty_kv_cache_blocks enable_caching enable_kv_cache_events
    kv_cache_config kv_cache_event_metadata log_stats mamba_fine_grained_prefix_cache max_model_len
    metrics_collector num_kv_cache_groups prefix_cache_stats retained_hit_group_ids use_eagle
    watermark_blocks
    """.split()
)


class RblnKvCacheManager(KVCacheManager):
    """Upstream's manager over our coordinator.

    Most tokens of a running request go to a block that it owns and complete no prefix that could
    be registered. Querying every group for each of them is a third of upstream's time to schedule
    a decode batch.
    """

    def __init__(self, upstream: KVCacheManager, coordinator: RblnKvCoordinator) -> None:
        """Take over the attributes of ``upstream``, which has allocated no block yet."""
        attributes = vars(upstream)
        unknown = sorted(attributes.keys() ^ _ATTRIBUTES)
        if unknown:
            raise RuntimeError(f"vLLM's KVCacheManager has other attributes than known: {unknown}")
        vars(self).update(attributes)
        self.coordinator = self.rbln_coordinator = coordinator
        self.block_pool = coordinator.block_pool
        self._unit = coordinator.block_pool.hash_block_size
        self._events = BlockEvents(coordinator)
        # Upstream does not know the kind of our window groups.
        known = list(self.kv_cache_event_metadata)
        for window in coordinator.windows:
            known[window.kv_cache_group_id] = (_WINDOW_KIND, window.log.window)
        self.kv_cache_event_metadata = tuple(known)

    def estimate_cached_tokens(self, request: Request) -> int:
        """Return the tokens of a request that others can share: whole units, not whole blocks."""
        return request.num_computed_tokens // self._unit * self._unit if self.enable_caching else 0

    def peek_hit(self, request: Request) -> int:
        """Return the tokens that a prefix hit would save ``request``; changes nothing."""
        if not self.prefix_cache_lookup_enabled(request):
            return 0
        # The last token is always computed, for its logits.
        return self.rbln_coordinator.peek_hit(request.block_hashes, request.num_tokens - 1)

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[KVCacheBlock]]:
        """As upstream, with a ``HeadCopy`` for each copy."""
        copies, retained = super().take_kv_cache_block_copies()
        heads = self.rbln_coordinator.take_head_copies()
        if [head[:2] for head in heads] != copies:
            raise RuntimeError("a group of the KV cache copies blocks of its own")
        return heads, retained

    def take_events(self) -> list[KVCacheEvent]:
        return [*self._events.filter(super().take_events())]

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *positional: Any,
        **options: Any,
    ) -> KVCacheBlocks | None:
        if (
            num_new_tokens == 1
            and options == _RUNNING
            and not (num_new_computed_tokens or positional)
            # Every block and every page begins and ends at a multiple of the unit.
            and 0 < request.num_computed_tokens % self._unit < self._unit - 1
        ):
            return self.empty_kv_cache_blocks
        given = (num_new_tokens, num_new_computed_tokens, *positional)
        allocated = super().allocate_slots(request, *given, **options)
        if allocated is not None:
            start = request.num_computed_tokens + num_new_computed_tokens
            end = start + num_new_tokens
            places = slice(start // self._unit, end // self._unit)
            self.rbln_coordinator.unwritten.update(request.block_hashes[places])
            if num_new_computed_tokens:
                self._events.report_reuse(request, num_new_computed_tokens)
        return allocated
