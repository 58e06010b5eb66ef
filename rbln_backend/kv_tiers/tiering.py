"""The scheduler's side of KV tiers: what is read before a prompt begins, and what a step stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rbln_backend.kv_cache.adapter_digests import AdapterHasher
from rbln_backend.kv_cache.manager import RblnKvCacheManager
from rbln_backend.kv_cache.transfers import PageMove, PageMoves
from rbln_backend.kv_tiers.page_keys import PageKeys
from rbln_backend.kv_tiers.page_layout import PageLayout
from rbln_backend.kv_tiers.page_memory import new_page
from rbln_backend.kv_tiers.page_store import PageStore, PrefixRead, ReadPlan
from rbln_backend.kv_tiers.placement import PagePlace, Placement
from rbln_backend.kv_tiers.tier_counts import TierMetrics
from rbln_backend.kv_tiers.window_pages import WindowPages
from rbln_backend.vllm_compat.surface import Request

# Bytes that one step copies in either direction; 64 MiB take about 10 ms.
_STEP_BYTES = 64 << 20
# Prompts whose pages are read, or lie in blocks before they begin.
_MOST_READS = 4


@dataclass
class _Reading:
    """A request whose pages are read."""

    request: Request
    read: PrefixRead
    place: PagePlace


@dataclass
class _Store:
    """A page that is stored after a step, if nothing intervenes."""

    request: Request
    end: int
    """End of the page in tokens."""
    key: bytes
    move: PageMove
    window: tuple[int, int] | None = None
    """Group and number of a page of a window group."""


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
        digests: Mapping[int, str],
    ) -> None:
        """``digests``: of the loaded adapters, by number."""
        self._store, self._keys, self._layout = store, keys, layout
        self._manager, self._metrics = manager, metrics
        self._digests = digests
        self._placement = Placement(manager.ours, layout.tokens)
        self._windows = WindowPages(manager.ours, layout)
        self._units = layout.tokens // manager.block_pool.hash_block_size
        self._most_pages = max(1, _STEP_BYTES // layout.num_bytes)
        self._reading: dict[str, _Reading] = {}
        self._looked_up: set[str] = set()
        """Requests whose reading has ended, or that have nothing to read."""
        self._stored: dict[str, int] = {}
        """Pages of each request that need no store any more."""
        self._loads: list[PageMove] = []
        self._stores: list[_Store] = []
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
        first, keys = self._missing(request)
        if not keys:
            self._looked_up.add(name)
            return True
        if len(self._reading) < _MOST_READS:
            read = self._store.read(self._plan(request, first, keys))
            self._reading[name] = _Reading(request, read, self._placement.begin(request, first))
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
            is_cut = len(moves) < len(pages)
            if is_cut or reading.read.is_over:
                windows = () if is_cut else reading.read.windows
                self._loads += [self._windows.load(reading.request, page) for page in windows]
                self._end_reading(name)
                self._looked_up.add(name)

    def take_moves(self) -> PageMoves:
        """Return the moves of the step that was just scheduled."""
        moves = PageMoves(self._loads, [])
        for store in self._stores:
            if self._is_there(store):
                moves.stores.append(store.move)
                self._computing.append((store.key, store.move.page))
        self._loads, self._stores = [], []
        return moves

    def end_step(self) -> None:
        """Store the pages that the latest step filled."""
        for key, page in self._computing:
            self._store.write(key, page)
        self._computing.clear()
        self._metrics.update(self._store.memory_bytes, self._store.folder_bytes)

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
        """Return whether pages of ``request`` are stored.

        Those of an adapter are, if their hashes have the digest of what is loaded: its number
        means other weights after a restart.
        """
        if request.lora_request is None:
            return True
        hasher = request._block_hasher
        digest = hasher.digest if isinstance(hasher, AdapterHasher) else None
        return digest is not None and self._digests.get(request.lora_request.lora_int_id) == digest

    def _missing(self, request: Request) -> tuple[int, list[bytes]]:
        """Return the first token and the keys of the pages that the prefix cache lacks."""
        if not self._is_kept(request) or not self._manager.prefix_cache_lookup_enabled(request):
            return 0, []
        first = self._placement.first_token(self._manager.peek_hit(request))
        return first, self._page_keys(request, first, request.num_tokens - 1)

    def _is_there(self, store: _Store) -> bool:
        """Return whether a page is where its move reads it, once the step has run.

        Its request still owns the block, and its tokens are computed; the log still has it.
        """
        if store.end > store.request.num_computed_tokens:
            return False
        return store.window is None or self._windows.is_unchanged(
            store.request, *store.window, store.move
        )

    def _plan(self, request: Request, first_token: int, keys: list[bytes]) -> ReadPlan:
        spans, first = self._windows.spans, first_token // self._layout.tokens
        end = (first + len(keys)) * self._layout.tokens
        window_keys = {group: self._page_keys(request, 0, end, group) for group in spans}
        return ReadPlan(self._layout, keys, first, window_keys, spans)

    def _page_keys(
        self, request: Request, first_token: int, num_tokens: int, group: int | None = None
    ) -> list[bytes]:
        """Return the keys of the whole pages between two numbers of tokens."""
        first, end = first_token // self._layout.tokens, num_tokens // self._layout.tokens
        ends = range((first + 1) * self._units - 1, end * self._units, self._units)
        return [self._keys.key(request.block_hashes[index], group) for index in ends]

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
        room = min(_STEP_BYTES, self._store.room)
        room -= sum(store.move.page.nbytes for store in self._stores)
        keys = self._page_keys(request, first * tokens, end * tokens)
        for page, key in enumerate(keys, start=first):
            if not self._store.knows(key):
                if room <= 0:
                    end = page
                    break
                buffer = new_page(self._layout.num_bytes)
                move = PageMove(buffer, self._placement.parts(request, page * tokens))
                self._stores.append(_Store(request, (page + 1) * tokens, key, move))
                room -= buffer.nbytes
        self._stored[request.request_id] = end
        self._note_windows(request, end)

    def _note_windows(self, request: Request, end: int) -> None:
        """Plan to store the window pages before page ``end`` that the log has."""
        tokens = self._layout.tokens
        for group, span in self._windows.spans.items():
            first = max(0, end - span)
            keys = self._page_keys(request, first * tokens, end * tokens, group)
            for page, key in enumerate(keys, start=first):
                move = None
                if not self._store.knows(key):
                    move = self._windows.store(request, group, page)
                if move is not None:
                    place = (page + 1) * tokens
                    self._stores.append(_Store(request, place, key, move, (group, page)))
