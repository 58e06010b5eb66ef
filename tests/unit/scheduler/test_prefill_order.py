"""The order of prompts: fewest tokens left first, and a bound for the delay of long ones."""

from __future__ import annotations

import random

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from rbln_backend.config import BACKGROUND_PRIORITY, FIRST_PRIORITY
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.scheduler.priorities import PrefillOrder
from rbln_backend.scheduler.steps import AGING

CHUNK = 64


class Reader:
    """Computes chunks of prompts in the order under test; one prompt per step."""

    def __init__(self, *, by_priority: bool = False) -> None:
        self.board = MetricsBoard(None, "scheduler0")
        self.hits: dict[str, int] = {}
        self.now = 0.0
        self.order = PrefillOrder(
            lambda request: self.hits.get(request.request_id, 0),
            self.board,
            by_priority=by_priority,
            clock=lambda: self.now,
        )
        self.unread: list[Request] = []
        self.done: list[str] = []
        self.log: list[tuple[str, int]] = []
        """Name and tokens of each chunk."""

    def add(self, name: str, tokens: int, priority: int = 0) -> Request:
        params = SamplingParams(max_tokens=2)
        request = Request(name, [0] * tokens, params, None, priority=priority)
        self.unread.append(request)
        self.order.add(request)
        return request

    def step(self) -> None:
        running = [r for r in self.unread if r.num_computed_tokens]
        request = self.order.first(running, 1, lambda request: True)[0]
        request.num_computed_tokens = request.num_computed_tokens or self.hits.get(
            request.request_id, 0
        )
        tokens = min(CHUNK, request.num_tokens - request.num_computed_tokens)
        self.order.computed([request], tokens, self.unread)
        request.num_computed_tokens += tokens
        self.log.append((request.request_id, tokens))
        self.now += 1
        if request.num_computed_tokens == request.num_tokens:
            self.unread.remove(request)
            self.order.ended(request.request_id)
            self.done.append(request.request_id)

    def to_the_end(self) -> list[str]:
        while self.unread:
            self.step()
        return self.done


def test_the_fewest_tokens_left_come_first() -> None:
    reader = Reader()
    reader.add("document", 300)
    reader.step()
    reader.add("turn", 40)
    reader.add("page", 180)
    reader.hits["known"] = 490
    reader.add("known", 500)
    # After its first chunk the document has 236 tokens left.
    assert reader.to_the_end() == ["known", "turn", "page", "document"]
    assert reader.board.value("rbln_prefill_overtaken_total") == 3
    assert reader.board.value("rbln_prefill_overtaken_seconds") == 3


def test_equal_prompts_keep_their_order_of_arrival() -> None:
    reader = Reader()
    names = [f"{number:02}" for number in range(20)]
    for name in names:
        reader.add(name, 100)
    assert reader.to_the_end() == names
    assert reader.board.value("rbln_prefill_overtaken_total") == 0


def test_priority_comes_before_length() -> None:
    reader = Reader()
    reader.add("short", 30)
    reader.add("first", 64, FIRST_PRIORITY)
    reader.add("later", 20, priority=7)
    assert reader.to_the_end() == ["first", "later", "short"]
    ranked = Reader(by_priority=True)
    ranked.add("short", 30)
    ranked.add("later", 20, priority=7)
    ranked.add("urgent", 64, priority=-3)
    assert ranked.to_the_end() == ["urgent", "short", "later"]


def test_background_requests_are_not_in_it() -> None:
    reader = Reader()
    background = reader.add("background", 10, BACKGROUND_PRIORITY)
    assert reader.order.first([], 4, lambda request: True) == []
    reader.order.ended(background.request_id)


def test_a_request_that_cannot_begin_stays() -> None:
    reader = Reader()
    blocked, other = reader.add("blocked", 10), reader.add("other", 20)
    assert reader.order.first([], 1, lambda request: request is other) == [other]
    assert reader.order.first([], 2, lambda request: True) == [blocked, other]


def test_a_preempted_request_is_there_once() -> None:
    reader = Reader()
    request = reader.add("preempted", 10)
    for _ in range(3):
        reader.order.computed([request], 10, [])
        assert reader.order.first([], 2, lambda request: True) == []
        reader.order.add(request)
        assert reader.order.first([], 2, lambda request: True) == [request]


@pytest.mark.parametrize("seed", range(20))
def test_later_prompts_delay_a_prompt_by_a_bounded_number_of_tokens(seed: int) -> None:
    """A stream of short prompts that takes more than all chunks would stop a long one forever."""
    rng, reader = random.Random(seed), Reader()
    sizes, delays = dict[str, int](), dict[str, int]()
    while len(reader.log) < 400:
        for _ in range(rng.choice([0, 1, 1, 2])):
            name = f"{len(sizes):04}"
            sizes[name] = rng.choice([5, 20, 40, 60, 200, 1000])
            reader.add(name, sizes[name])
        if not reader.unread:
            continue
        unread = [request.request_id for request in reader.unread]
        reader.step()
        computed, tokens = reader.log[-1]
        for name in unread:
            if name < computed:
                delays[name] = delays.get(name, 0) + tokens
    assert all(delay <= AGING * sizes[name] + CHUNK for name, delay in delays.items())
    assert max(delays.values()) > CHUNK
