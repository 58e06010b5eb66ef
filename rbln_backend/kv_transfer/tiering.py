"""The scheduler's side of KV tiers: what is read before a prompt begins, and what a step stores.

Pages that were read are put into the KV cache, where the usual prefix hits find them; pages of
window groups go between the prefix log and host memory.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from rbln_backend.config import RblnConfig
from rbln_backend.core import PageMove, PageMoves, PagePart
from rbln_backend.devices.emulated.kernel_set import active_isa
from rbln_backend.devices.port import device_capabilities, installed_sdk
from rbln_backend.graphs.model_fields import model_fields
from rbln_backend.kv_cache.coordinator import RblnKvCacheManager, RblnKvCoordinator
from rbln_backend.kv_transfer.page_store import (
    READS,
    WRITES,
    FolderTier,
    MemoryTier,
    PageKeys,
    PageLayout,
    PageStore,
    PrefixRead,
    ReadPlan,
    WindowPage,
    new_page,
    weights_digest,
)
from rbln_backend.lora.adapter_files import AdapterHasher, adapter_digests
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.settings import configured


@dataclass
class PagePlace:
    """Blocks that hold a growing prefix of a request that has not begun."""

    owner: Request
    """The request under another id, so that its own blocks are not these."""
    tokens: int
    """Tokens up to the end of the latest page."""


class Placement:
    """Owns the blocks of placed pages until their request begins.

    The blocks are registered like those of a computed prefix. Their release leaves them in the
    prefix cache, which may evict them like any other.
    """

    def __init__(self, coordinator: RblnKvCoordinator, page_tokens: int) -> None:
        self._coordinator = coordinator
        self._pool = coordinator.block_pool
        self._page_tokens = page_tokens

    def first_token(self, hit: int) -> int:
        """Return where the first page of a place begins: the block in which a local ``hit`` ends.

        A block is found by the whole prefix that it ends, so its head must be placed, too.
        """
        return min(hit // m.block_size * m.block_size for m in self._coordinator.paged)

    def begin(self, request: Request, first_token: int) -> PagePlace:
        owner = copy.copy(request)
        owner.request_id = f"kv-tier:{request.request_id}"
        for manager in self._coordinator.paged:
            blocks = first_token // manager.block_size
            manager.req_to_blocks[owner.request_id] = [self._pool.null_block] * blocks
            manager.num_cached_block[owner.request_id] = blocks
        return PagePlace(owner, first_token)

    def add(self, place: PagePlace, pages: Sequence[Tensor], spared: int) -> list[PageMove]:
        """Return the moves of the next ``pages`` [page_bytes]; fewer if it would leave few blocks.

        ``spared`` blocks of the pool stay free.
        """
        moves: list[PageMove] = []
        for page in pages:
            end = place.tokens + self._page_tokens
            if self._pool.get_num_free_blocks() - self._missing(place, end) < spared:
                break
            self._grow(place, end)
            moves.append(PageMove(page, self.parts(place.owner, place.tokens)))
            place.tokens = end
        if moves:
            for manager in self._coordinator.paged:
                manager.cache_blocks(place.owner, place.tokens, replay_boundaries=())
        return moves

    def parts(self, request: Request, start: int) -> list[PagePart]:
        """Return the parts of the page that begins at ``start`` tokens, in the request's blocks."""
        parts: list[PagePart] = []
        for manager in self._coordinator.paged:
            block = manager.req_to_blocks[request.request_id][start // manager.block_size]
            slot, group = start % manager.block_size, manager.kv_cache_group_id
            parts.append(PagePart(group, block.block_id, slot, self._page_tokens))
        return parts

    def release(self, place: PagePlace) -> None:
        """Leave the blocks of ``place`` to the prefix cache."""
        for manager in self._coordinator.paged:
            manager.free(place.owner.request_id)

    def _missing(self, place: PagePlace, end: int) -> int:
        """Return the blocks that ``place`` lacks for tokens up to ``end``."""
        owned = ((m, m.req_to_blocks[place.owner.request_id]) for m in self._coordinator.paged)
        return sum(-(-end // m.block_size) - len(blocks) for m, blocks in owned)

    def _grow(self, place: PagePlace, end: int) -> None:
        for manager in self._coordinator.paged:
            blocks = manager.req_to_blocks[place.owner.request_id]
            if len(blocks) * manager.block_size < end:
                blocks.extend(self._pool.get_new_blocks(1))


class WindowPages:
    """Moves of the pages of all window groups of a model; it may have none.

    A page of KV tiers is some pages of the log. The log has only what the window block held after a
    step, so not every page of a prompt can be stored.
    """

    def __init__(self, coordinator: RblnKvCoordinator, layout: PageLayout) -> None:
        self._managers = {m.kv_cache_group_id: m for m in coordinator.windows}
        self._layout = layout
        self._unit = coordinator.block_pool.hash_block_size
        self._units = layout.tokens // self._unit

    @property
    def spans(self) -> dict[int, int]:
        """Pages before its end that a prefix needs, by group."""
        tokens = self._layout.tokens
        return {group: -(-m.log.window // tokens) for group, m in self._managers.items()}

    def load(self, request: Request, found: WindowPage) -> PageMove:
        """Return the move of a page that was read into the log."""
        first = found.number * self._units
        pages = self._managers[found.group].refill(request, first, first + self._units)
        return PageMove(found.page, self._parts(found.group, pages))

    def store(self, request: Request, group: int, number: int) -> PageMove | None:
        """Return the move of a page out of the log, None where the log lacks a part of it."""
        pages = self._managers[group].log.find(self._hashes(request, number))
        if pages is None:
            return None
        page = new_page(self._layout.window_bytes[group])
        return PageMove(page, self._parts(group, pages))

    def is_unchanged(self, request: Request, group: int, number: int, move: PageMove) -> bool:
        """Return whether the log still has the page where ``move`` reads it."""
        pages = self._managers[group].log.find(self._hashes(request, number))
        return pages == [part.block for part in move.parts]

    def _hashes(self, request: Request, number: int) -> list[bytes]:
        return list(request.block_hashes[number * self._units : (number + 1) * self._units])

    def _parts(self, group: int, pages: list[int]) -> list[PagePart]:
        return [PagePart(group, page, 0, self._unit) for page in pages]


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
        board: MetricsBoard,
        digests: Mapping[int, str],
    ) -> None:
        """``digests``: of the loaded adapters, by number."""
        self._store, self._keys, self._layout = store, keys, layout
        self._manager = manager
        self._reads = {x: board.counter("rbln_kv_tier_reads_total", result=x) for x in READS}
        self._writes = {x: board.counter("rbln_kv_tier_writes_total", result=x) for x in WRITES}
        self._tokens = board.counter("rbln_kv_tier_tokens_total")
        self._memory_bytes = board.gauge("rbln_kv_tier_bytes", tier="memory")
        self._folder_bytes = board.gauge("rbln_kv_tier_bytes", tier="folder")
        self._digests = digests
        self._placement = Placement(manager.rbln_coordinator, layout.tokens)
        self._windows = WindowPages(manager.rbln_coordinator, layout)
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
        manager.rbln_coordinator.on_cached = self._note

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
            self._tokens.inc(len(moves) * self._layout.tokens)
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
            # Where its move reads it, once the step has run: its request still owns the block, and
            # its tokens are computed; the log still has it.
            if store.end <= store.request.num_computed_tokens and (
                store.window is None
                or self._windows.is_unchanged(store.request, *store.window, store.move)
            ):
                moves.stores.append(store.move)
                self._computing.append((store.key, store.move.page))
        self._loads, self._stores = [], []
        return moves

    def end_step(self) -> None:
        """Store the pages that the latest step filled."""
        for key, page in self._computing:
            self._store.write(key, page)
        self._computing.clear()
        store = self._store
        for counters, counts in zip((self._reads, self._writes), store.take_counts(), strict=True):
            for result, count in counts.items():
                counters[result].inc(count)
        # Most steps change neither, and setting a gauge costs microseconds.
        if store.memory_bytes != self._memory_bytes.value:
            self._memory_bytes.set(store.memory_bytes)
        if store.folder_bytes != self._folder_bytes.value:
            self._folder_bytes.set(store.folder_bytes)

    def clear(self) -> None:
        """Remove every stored page of this model."""
        self._store.clear()
        self._stored.clear()

    def close(self) -> None:
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
        # The window pages before page ``end`` that the log has.
        for group, span in self._windows.spans.items():
            first = max(0, end - span)
            keys = self._page_keys(request, first * tokens, end * tokens, group)
            for page, key in enumerate(keys, start=first):
                if self._store.knows(key):
                    continue
                logged = self._windows.store(request, group, page)
                if logged is not None:
                    page_end = (page + 1) * tokens
                    self._stores.append(_Store(request, page_end, key, logged, (group, page)))


logger = init_logger(__name__)


def make_tiering(
    config: VllmConfig, kv_cache: KVCacheConfig, manager: RblnKvCacheManager, board: MetricsBoard
) -> KvTiering | None:
    """Return the tiers; None where none is configured or prefixes are not reused.

    Raises ``ConfigError`` for weights that cannot be identified, and for a folder that cannot be
    used.
    """
    rbln = configured(config)
    if not rbln.has_kv_tiers:
        return None
    if not config.cache_config.enable_prefix_caching:
        logger.warning("KV tiers have no effect: prefix caching is off")
        return None
    blocks = [paged.block_size for paged in manager.rbln_coordinator.paged]
    layout = PageLayout.of(kv_cache, manager.block_pool.hash_block_size, blocks)
    made_by = _made_by(config, rbln, kv_cache, layout)
    keys = PageKeys({**made_by, "unit": manager.block_pool.hash_block_size})
    memory = folder = None
    if rbln.kv_tier_memory_bytes:
        memory = MemoryTier(rbln.kv_tier_memory_bytes)
    if rbln.kv_tier_folder is not None:
        root = Path(rbln.kv_tier_folder)
        folder = FolderTier(root, keys.folder_name, rbln.kv_tier_folder_bytes)
    logger.info(
        "KV tiers: pages of %d tokens, %d bytes; memory %d bytes; folder %s",
        layout.tokens,
        layout.num_bytes,
        rbln.kv_tier_memory_bytes,
        rbln.kv_tier_folder,
    )
    digests = adapter_digests(config.instance_id)
    return KvTiering(PageStore(memory, folder), keys, layout, manager, board, digests)


def _made_by(
    config: VllmConfig, rbln: RblnConfig, kv_cache: KVCacheConfig, layout: PageLayout
) -> dict[str, Any]:
    """Return everything besides tokens that changes the bytes of a page."""
    model, cache, device = config.model_config, config.cache_config, device_capabilities(rbln)
    started = time.perf_counter()
    weights = weights_digest(model.model, str(config.load_config.load_format), model.seed)
    logger.info("KV tiers: weights identified in %.2f s", time.perf_counter() - started)
    algorithm = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    return {
        "weights": weights,
        "options": model.override_generation_config,
        # The instruction set of the kernels, or the NPU and the version of its compiler.
        "kernels": active_isa()
        if device.runs_on_host
        else f"{device.product}, SDK {getattr(installed_sdk(), '__version__', 'unknown')}",
        **model_fields(config, rbln),
        "layers": [
            [group.layer_names, repr(group.kv_cache_spec)] for group in kv_cache.kv_cache_groups
        ],
        "page_tokens": layout.tokens,
        "hashes": [cache.prefix_caching_hash_algo, resolve_none_hash_seed(algorithm)],
    }
