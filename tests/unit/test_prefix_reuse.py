"""Any interleaving of add, chunk, preempt, hit and abort reads the right tokens and leaks nothing.

The managers, the coordinator and the cache tensors are the real ones. In place of a model, each
step writes token ids as keys and positions as values, after checking that what its attention
would read are exactly the request's own earlier tokens.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.request import Request

from rbln_backend.devices.emulated.memory import HostKvMemory
from rbln_backend.kv_cache.coordinator import RblnKvCacheManager, RblnKvCoordinator
from rbln_backend.kv_cache.managers import register_specs
from rbln_backend.kv_cache.specs import AppendedWindowSpec, PagedSpec, WindowSpec, window_in
from rbln_backend.kv_cache.tensors import KvCaches

HASH = get_hash_fn_by_name("sha256")
MAX_LEN = 120
MAX_REQUESTS = 4


@dataclass
class Shape:
    block_size: int
    unit: int
    windows: list[int]
    paged: bool
    num_blocks: int
    log_pages: int
    chunk: int
    appended: tuple[int, ...] = ()
    """Windows in pages."""


def cache_config(shape: Shape) -> KVCacheConfig:
    common = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = []
    if shape.paged:
        groups.append(KVCacheGroupSpec(["full"], PagedSpec(block_size=shape.block_size, **common)))
    for window in shape.windows:
        spec = WindowSpec(
            block_size=shape.block_size,
            window=window,
            own_blocks=MAX_REQUESTS + 1 if shape.paged else 0,
            log_pages=shape.log_pages,
            page_tokens=shape.unit,
            **common,
        )
        groups.append(KVCacheGroupSpec([f"window{window}"], spec))
    num_blocks = shape.num_blocks or MAX_REQUESTS * len(groups) + 1
    in_pages = ["full"]
    for window in shape.appended:
        spec = AppendedWindowSpec(block_size=shape.block_size, sliding_window=window, **common)
        groups.append(KVCacheGroupSpec([f"pages{window}"], spec))
        in_pages.append(f"pages{window}")
    # As in vLLM's pool, groups share their memory.
    tensors = [KVCacheTensor(size=0, layers=in_pages, layer_stride=0, block_stride=0)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


class World:
    """A scheduler's bookkeeping and a device that only remembers tokens."""

    def __init__(self, shape: Shape, *, events: bool = False) -> None:
        register_specs()
        init_none_hash(HASH)
        self.shape = shape
        self.config = cache_config(shape)
        sizes = {
            "kv_cache_config": self.config,
            "max_model_len": MAX_LEN,
            "max_in_flight_tokens": shape.chunk,
            "scheduler_block_size": shape.block_size,
        }
        sizes |= {"enable_caching": True, "enable_kv_cache_events": events}
        upstream = KVCacheManager(**sizes, hash_block_size=shape.block_size, log_stats=True)
        worlds = {"use_eagle": False, "dcp_world_size": 1, "pcp_world_size": 1}
        self.coordinator = RblnKvCoordinator(**sizes, **worlds, hash_block_size=shape.unit)
        self.manager = RblnKvCacheManager(upstream, self.coordinator)
        self.caches = KvCaches.allocate(self.config, HostKvMemory())
        for cache in self.caches.tensors.values():
            cache.fill_(float("nan"))
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.hits = 0

    def add(
        self, name: str, tokens: list[int], salt: str | None, extra: dict[str, str] | None = None
    ) -> None:
        params = SamplingParams(max_tokens=5, extra_args=extra)
        hasher = get_request_block_hasher(self.shape.unit, HASH)
        request = Request(name, tokens, params, None, cache_salt=salt, block_hasher=hasher)
        self.waiting.append(request)

    def admit(self, most: int = 1) -> None:
        """Let up to ``most`` requests begin in one step."""
        begun: list[tuple[Request, int]] = []
        while self.waiting and len(self.running) < MAX_REQUESTS and len(begun) < most:
            request = self.waiting[0]
            peeked = self.peek(request)
            blocks, hit, _ = self.manager.get_computed_blocks(request)
            assert peeked == hit
            count = min(self.shape.chunk, request.num_tokens - hit)
            if self.manager.allocate_slots(request, count, hit, blocks) is None:
                assert self.running, "an empty engine takes any request"
                break
            self.waiting.remove(request)
            self.running.append(request)
            self.hits += hit
            request.num_computed_tokens = hit
            begun.append((request, count))
        self.step(*begun)

    def peek(self, request: Request) -> int:
        """Return the hit of ``request``; asserts that no eviction order changed."""
        orders = [list(window.log._pages) for window in self.coordinator.windows]
        hit = self.manager.peek_hit(request)
        assert orders == [list(window.log._pages) for window in self.coordinator.windows]
        return hit

    def advance(self, request: Request) -> None:
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(random.Random(request.num_tokens).randrange(3))
        left = request.num_tokens - request.num_computed_tokens
        count = min(self.shape.chunk, left)
        # As vLLM's scheduler asks for a running request.
        while self.manager.allocate_slots(request, count, num_lookahead_tokens=0) is None:
            self.preempt(self.running[-1])
            if request not in self.running:
                return
        self.step((request, count))

    def preempt(self, request: Request) -> None:
        self.release(request)
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)

    def release(self, request: Request) -> None:
        self.manager.free(request)
        self.running.remove(request)

    def step(self, *work: tuple[Request, int]) -> None:
        copies, retained = self.manager.take_kv_cache_block_copies()
        self.caches.copy_heads(copies)
        self.manager.block_pool.free_blocks(retained)
        transfers = self.coordinator.take_transfers()
        self.caches.restore_windows(transfers)
        # In any order: what a step writes none of its requests may read of another.
        for request, count in reversed(work):
            self.compute(request, count)
        self.caches.store_windows(transfers)

    def compute(self, request: Request, count: int) -> None:
        tokens = torch.tensor(list(request.all_token_ids), dtype=torch.float32)
        start, end = request.num_computed_tokens, request.num_computed_tokens + count
        for index, group in enumerate(self.config.kv_cache_groups):
            (name,) = group.layer_names
            cache = self.caches.tensors[name][:, :, 0, 0, :, 0]
            ids = [b.block_id for b in self.coordinator.get_blocks(request.request_id)[index]]
            spec = group.kv_cache_spec
            if isinstance(spec, WindowSpec):
                self.slide(cache, ids, spec.window, tokens, start, end)
            else:
                window = window_in(spec)
                oldest = 0 if window is None else max(0, start - window + 1)
                self.append(cache, ids, tokens, (oldest, start, end))
        request.num_computed_tokens = end

    def append(
        self, cache: Tensor, ids: list[int], tokens: Tensor, places: tuple[int, int, int]
    ) -> None:
        oldest, start, end = places
        size = self.shape.block_size
        for position in range(oldest, end):
            assert ids[position // size], "the null block belongs to no request"
            slot = cache[ids[position // size], :, position % size]
            if position >= start:
                slot[0], slot[1] = tokens[position], position
            assert slot.tolist() == [tokens[position], position]

    def slide(
        self, cache: Tensor, ids: list[int], window: int, tokens: Tensor, start: int, end: int
    ) -> None:
        (block,) = ids
        for first, last in ((max(0, start - window), start), (max(0, end - window), end)):
            if last == end:
                cache[block] = float("nan")
                cache[block, 0, : last - first] = tokens[first:last]
                cache[block, 1, : last - first] = torch.arange(first, last)
            assert cache[block, 0, : last - first].tolist() == tokens[first:last].tolist()
            assert cache[block, 1, : last - first].tolist() == list(range(first, last))

    def assert_nothing_is_held(self) -> None:
        pool = self.coordinator.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks[1:])
        for manager in self.coordinator.single_type_managers:
            # Upstream looks up the windows of requests that wait, which makes empty entries.
            assert not any(manager.req_to_blocks.values())
            assert not manager.num_cached_block
        for window in self.coordinator.windows:
            assert window.num_blocks_in_use == 0
            assert window.log.num_used <= window.log.num_pages
        assert not self.coordinator.take_transfers()


SHAPES = {
    "full": Shape(16, 16, [], True, 20, 0, 24),
    "sub-block": Shape(32, 4, [], True, 12, 0, 24),
    "one window": Shape(16, 4, [24], False, 0, 40, 16),
    "chunk over window": Shape(16, 4, [10], False, 0, 30, 32),
    "odd windows": Shape(16, 4, [7, 30], False, 0, 80, 16),
    "hybrid": Shape(16, 4, [24], True, 24, 40, 16),
    "hybrid, two windows": Shape(32, 8, [12, 50], True, 14, 30, 32),
    "window in pages": Shape(16, 4, [], False, 24, 0, 16, appended=(10,)),
    "windows over pages": Shape(16, 4, [], False, 40, 0, 16, appended=(17, 40)),
    "hybrid in pages": Shape(32, 8, [], True, 26, 0, 32, appended=(12, 50)),
}


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.wide) for n in range(2, 6))]
)
@pytest.mark.parametrize("name", SHAPES)
def test_every_step_reads_its_own_tokens_and_nothing_leaks(name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    world = World(SHAPES[name])
    stems = [[rng.randrange(50) for _ in range(90)] for _ in range(2)]
    for number in range(60):
        stem = rng.choice(stems)[: rng.randrange(1, 91)]
        tail = [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
        world.add(str(number), stem + tail, rng.choice([None, None, "other"]))
        for _ in range(rng.randrange(10)):
            action = rng.random()
            if action < 0.3:
                world.admit(3 if number % 3 == 0 else 1)
            elif world.running:
                request = rng.choice(world.running)
                if action < 0.35:
                    world.preempt(request)
                elif action < 0.45 or request.num_tokens >= MAX_LEN:
                    world.release(request)
                else:
                    world.advance(request)
    while world.running:
        world.release(world.running[-1])
    world.assert_nothing_is_held()
    assert world.hits > 0, "the test means nothing without prefix hits"
    assert world.coordinator.reset_prefix_cache()


@pytest.mark.parametrize("name", ["sub-block", "one window", "hybrid", "window in pages"])
def test_another_salt_never_hits(name: str) -> None:
    world = World(SHAPES[name])
    tokens = list(range(80))
    world.add("first", tokens, "a")
    world.admit()
    while world.running[0].num_computed_tokens < 80:
        world.advance(world.running[0])
    # The tokens reported as written to the cache can be reused: all but the last unit, which
    # holds the token that they have to compute.
    written = world.manager.estimate_cached_tokens(world.running[0])
    assert written == 80 // world.shape.unit * world.shape.unit
    for salt, expected in (("b", 0), (None, 0), ("a", 76)):
        world.add(f"salt {salt}", tokens, salt)
        before = world.hits
        world.admit()
        assert world.hits - before == expected


def test_a_manager_with_unknown_attributes_is_rejected() -> None:
    world = World(Shape(16, 4, [], True, 8, 0, 32))
    sizes = {"scheduler_block_size": 16, "hash_block_size": 16, "max_model_len": MAX_LEN}
    upstream = KVCacheManager(kv_cache_config=world.config, **sizes)
    upstream.partial_blocks = upstream.coordinator.single_type_managers  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="partial_blocks"):
        RblnKvCacheManager(upstream, world.coordinator)


# ------------------------------------------------------------------------------------------- events
FULL = {"kv_cache_report_mode": "full"}
EXTRAS: list[dict[str, str] | None] = [None, FULL, {"kv_cache_report_mode": "incremental"}]
NAMES = ("full", "sub-block", "hybrid", "hybrid, two windows", "one window", "hybrid in pages")


class Router:
    """Applies events, and compares them with the pool of the engine that sent them."""

    def __init__(self, world: World) -> None:
        self._world = world
        kinds = world.manager.kv_cache_event_metadata
        self.windows = {group: window for group, (_, window) in enumerate(kinds)}
        self.held: set[tuple[int | None, Any]] = set()
        self.tokens: dict[Any, list[int]] = {}
        self.seen: list[Request] = []

    def read(self) -> list[BlockStored]:
        """Apply the events of a step; return those of stored blocks."""
        stored = []
        for event in self._world.manager.take_events():
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
            elif isinstance(event, BlockStored):
                self._store(event)
                stored.append(event)
            elif isinstance(event, BlockRemoved):
                # ``remove`` raises for a block that was not reported as stored.
                for block_hash in event.block_hashes:
                    self.held.remove((event.group_idx, block_hash))
        assert self.held == self._in_pool()
        return stored

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert size == self._world.shape.unit
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.extra_keys is not None
        assert len(event.extra_keys) == len(event.block_hashes)
        for number, block_hash in enumerate(event.block_hashes):
            known = self.tokens[parent] if parent is not None else []
            prefix = known + list(event.token_ids[number * size : (number + 1) * size])
            assert self.tokens.setdefault(block_hash, prefix) == prefix
            self.held.add((event.group_idx, block_hash))
            parent = block_hash

    def _in_pool(self) -> set[tuple[int | None, Any]]:
        world = self._world.coordinator
        hashes = {block_hash for request in self.seen for block_hash in request.block_hashes}
        held = {
            (group.kv_cache_group_id, maybe_convert_block_hash(block_hash))
            for block_hash in hashes
            for group in (*world.paged, *world.appended)
            if world.block_pool.get_cached_block(block_hash, [group.kv_cache_group_id])
        }
        return held | {
            (window.kv_cache_group_id, maybe_convert_block_hash(BlockHash(block_hash)))
            for window in world.windows
            for block_hash in window.log._pages
        }

    def predict(self, request: Request) -> int:
        """Return the tokens that a prefix hit will save, from events alone."""
        unit: int = self._world.shape.unit
        names = [maybe_convert_block_hash(x) for x in request.block_hashes]
        last: int = (request.num_tokens - 1) // unit
        for end in range(last, 0, -1):
            if all(
                (group, name) in self.held
                for group, window in self.windows.items()
                for name in names[max(0, end * unit - window) // unit if window else 0 : end]
            ):
                return end * unit
        return 0


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in range(1, 3))]
)
@pytest.mark.parametrize("name", NAMES)
def test_events_match_the_blocks_of_the_pool(name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    world = World(SHAPES[name], events=True)
    router = Router(world)
    stems = [[rng.randrange(50) for _ in range(90)] for _ in range(2)]
    reports = 0
    for number in range(60):
        tokens = rng.choice(stems)[: rng.randrange(1, 91)] + [rng.randrange(50)] * 3
        world.add(str(number), tokens, rng.choice([None, "other"]), rng.choice(EXTRAS))
        router.seen.append(world.waiting[-1])
        for _ in range(rng.randrange(10)):
            if rng.random() < 0.4:
                # Prefixes are looked up for requests that are not admitted yet, too.
                for request in world.waiting:
                    predicted = router.predict(request)
                    assert world.manager.get_computed_blocks(request)[1] == predicted
                world.admit(rng.randrange(1, 4))
            elif world.running:
                request = rng.choice(world.running)
                if rng.random() < 0.3 or request.num_tokens >= MAX_LEN:
                    world.release(request)
                else:
                    world.advance(request)
            reports += len(router.read())
    while world.running:
        world.release(world.running[-1])
    assert world.coordinator.reset_prefix_cache()
    router.read()
    assert reports > 0 and not router.held


@pytest.mark.parametrize("name", ["full", "sub-block", "hybrid", "one window"])
@pytest.mark.parametrize("extra", EXTRAS, ids=str)
def test_a_reused_prefix_is_reported_once_for_requests_in_full_mode(
    name: str, extra: dict[str, str] | None
) -> None:
    world = World(SHAPES[name], events=True)
    router, tokens = Router(world), list(range(80))
    world.add("first", tokens, None)
    world.admit()
    while world.running[0].num_computed_tokens < 80:
        world.advance(world.running[0])
    router.seen += world.running
    router.read()
    world.add("second", [*tokens, 90, 91], None, extra)
    assert router.predict(world.waiting[0]) > 0
    for _ in range(3):
        world.manager.get_computed_blocks(world.waiting[0])
    world.admit()
    assert world.hits > 0
    known = {name for name, prefix in router.tokens.items() if len(prefix) <= world.hits}
    reports = [event for event in router.read() if known & {*event.block_hashes}]
    if extra != FULL:
        assert reports == []
        return
    assert len(reports) == len(router.windows)
    for report in reports:
        assert report.group_idx is not None
        # Of a window, only the pages that the request resumes from.
        window, unit = router.windows[report.group_idx], world.shape.unit
        first = max(0, world.hits - window) // unit * unit if window else 0
        assert list(report.token_ids) == tokens[first : world.hits]
        assert (report.parent_block_hash is None) == (first == 0)


def test_a_removal_is_reported_for_the_last_block_with_its_tokens() -> None:
    """Two requests compute the same prefix at once, so that two blocks hold it."""
    world = World(SHAPES["full"], events=True)
    router = Router(world)
    for name in ("one", "two"):
        world.add(name, [*range(16)], None)
    router.seen += world.waiting
    world.admit(2)
    router.read()
    blocks = [world.coordinator.get_blocks(name)[0][0].block_id for name in ("one", "two")]
    held = []
    for block in dict.fromkeys(blocks):
        held.append(len(router.held))
        world.coordinator.block_pool.evict_blocks({block})
        router.read()
    assert [*held, len(router.held)] == [1, 1, 0]
