"""The scheduler's side of KV tiers: what is read before a prompt begins, and what a step stores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rbln_backend.kv_cache.manager import RblnKvCacheManager
from rbln_backend.kv_cache.transfers import PageMove, PageMoves
from rbln_backend.kv_tiers.page_keys import PageKeys
from rbln_backend.kv_tiers.page_layout import PageLayout
from rbln_backend.kv_tiers.page_store import PageStore, PrefixRead
from rbln_backend.kv_tiers.placement import PagePlace, Placement
from rbln_backend.kv_tiers.tier_counts import TierMetrics
from rbln_backend.vllm_compat.surface import Request

# Bytes that one step copies in either direction; 64 MiB take about 10 ms.
_STEP_BYTES = 64 << 20
# Prompts whose pages are read, or lie in blocks before they begin.
_MOST_READS = 4


@dataclass
class _Reading:
    """A request whose pages are read."""

    read: PrefixRead
    place: PagePlace


class KvTiering:
    """Decides for each request which pages to read, and after which step a page is stored.

    Pages are placed in the prefix cache before their request begins, so that hits, sub-blocks,
    copies and answers are those of a prefix that never left. A request that is waiting to begin
    begins once its pages are placed; others go on meanwhile.
    """

    def __init__(
        self,
        store: PageStore,
        keys: PageKeys,
        layout: PageLayout,
        manager: RblnKvCacheManager,
        metrics: TierMetrics,
    ) -> None:
        self._store, self._keys, self._layout = store, keys, layout
        self._manager, self._metrics = manager, metrics
        self._placement = Placement(manager.ours, layout.tokens)
        self._units = layout.tokens // manager.block_pool.hash_block_size
        self._most_pages = max(1, _STEP_BYTES // layout.num_bytes)
        self._reading: dict[str, _Reading] = {}
        self._looked_up: set[str] = set()
        """Requests whose reading has ended, or that have nothing to read."""
        self._stored: dict[str, int] = {}
        """Pages of each request that need no store any more."""
        self._loads: list[PageMove] = []
        self._stores: list[tuple[Request, int, bytes, PageMove]] = []
        """Request, end of the page in tokens, its key, its move."""
        self._computing: list[tuple[bytes, Tensor]] = []
        manager.ours.on_cached = self._note

    def may_begin(self, request: Request) -> bool:
        """Return whether all pages of a waiting request are placed; start to read them if need be.

        While too many others are read, the answer is False and nothing is started.
        """
        name = request.request_id
        if name in self._looked_up:
            return True
        if name in self._reading:
            return False
        if not self._is_kept(request) or not self._manager.prefix_cache_lookup_enabled(request):
            self._looked_up.add(name)
            return True
        first = self._placement.first_token(self._manager.peek_hit(request))
        keys = self._page_keys(request, first, request.num_tokens - 1)
        if not keys:
            self._looked_up.add(name)
            return True
        if len(self._reading) < _MOST_READS:
            place = self._placement.begin(request, first)
            self._reading[name] = _Reading(self._store.read(keys), place)
        return False

    def forget(self, request: Request) -> None:
        """Drop what is kept about a request that ended."""
        self._end_reading(request.request_id)
        self._looked_up.discard(request.request_id)
        self._stored.pop(request.request_id, None)

    def place_pages(self, spared: int) -> None:
        """Place pages that were read; ``spared`` blocks of the pool are left to running requests.

        A prefix whose next page finds no block ends there.
        """
        room = self._most_pages
        for name, reading in list(self._reading.items()):
            pages = reading.read.take(room)
            moves = self._placement.add(reading.place, pages, spared)
            self._loads += moves
            room -= len(moves)
            self._metrics.placed(len(moves) * self._layout.tokens)
            if len(moves) < len(pages):
                reading.read.end()
                reading.read.take(len(pages) + self._most_pages)
            if reading.read.is_over:
                self._end_reading(name)
                self._looked_up.add(name)

    def take_moves(self) -> PageMoves:
        """Return the moves of the step that was just scheduled.

        A page is stored only if its request still owns the block and its tokens are computed.
        """
        moves = PageMoves(self._loads, [])
        for request, end, key, move in self._stores:
            if end <= request.num_computed_tokens:
                moves.stores.append(move)
                self._computing.append((key, move.page))
        self._loads, self._stores = [], []
        return moves

    def end_step(self) -> None:
        """Store the pages that the latest step filled."""
        for key, page in self._computing:
            self._store.write(key, page)
        self._computing.clear()
        self._metrics.update()

    def clear(self) -> None:
        """Remove every stored page of this model."""
        self._store.clear()
        self._stored.clear()

    def close(self) -> None:
        """Write what waits."""
        for name in list(self._reading):
            self._end_reading(name)
        self._store.close()

    def _is_kept(self, request: Request) -> bool:
        """Return whether pages of ``request`` are stored: not those of adapters.

        An adapter's number, which is part of its hashes, means other weights after a restart.
        """
        return request.lora_request is None

    def _page_keys(self, request: Request, first_token: int, num_tokens: int) -> list[bytes]:
        """Return the keys of the whole pages between two numbers of tokens."""
        first, end = first_token // self._layout.tokens, num_tokens // self._layout.tokens
        ends = range((first + 1) * self._units - 1, end * self._units, self._units)
        return [self._keys.key(request.block_hashes[index]) for index in ends]

    def _end_reading(self, name: str) -> None:
        reading = self._reading.pop(name, None)
        if reading is not None:
            reading.read.end()
            self._placement.release(reading.place)

    def _note(self, request: Request, num_tokens: int) -> None:
        """Plan to store the pages up to ``num_tokens``, which the step being scheduled computes."""
        if not self._is_kept(request):
            return
        tokens = self._layout.tokens
        first, end = self._stored.get(request.request_id, 0), num_tokens // tokens
        if first >= end:
            return
        room = min(self._most_pages, self._store.room) - len(self._stores)
        keys = self._page_keys(request, first * tokens, end * tokens)
        for page, key in enumerate(keys, start=first):
            if not self._store.knows(key):
                if room <= 0:
                    end = page
                    break
                room -= 1
                buffer = torch.empty(self._layout.num_bytes, dtype=torch.uint8)
                move = PageMove(buffer, self._places(request, page * tokens))
                self._stores.append((request, (page + 1) * tokens, key, move))
        self._stored[request.request_id] = end

    def _places(self, request: Request, start: int) -> list[tuple[int, int]]:
        places: list[tuple[int, int]] = []
        for manager in self._manager.ours.paged:
            block = manager.req_to_blocks[request.request_id][start // manager.block_size]
            places.append((block.block_id, start % manager.block_size))
        return places
