"""A router that follows KV events knows at every moment which units an engine can reuse."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.request import Request

from tests.unit.kv_cache.test_reuse import MAX_LEN, SHAPES, World

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


@pytest.mark.parametrize("seed", range(3))
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
