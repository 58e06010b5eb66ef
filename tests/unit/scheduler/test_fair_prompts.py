"""Weighted fair queueing between keys: shares of computed tokens, and the order within a key."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.pooling_params import PoolingParams
from vllm.v1.request import Request

from rbln_backend.config import BACKGROUND_PRIORITY, FIRST_PRIORITY
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.scheduler.fairness.fair_prompts import OUTPUT_COST, FairPrompts
from rbln_backend.scheduler.fairness.key_share import SHARE_ARGS, KeyShare
from rbln_backend.scheduler.prefill_order import PrefillOrder

CHUNK = 64


def _request(name: str, tokens: int, share: KeyShare, priority: int = 0) -> Request:
    params = SamplingParams(max_tokens=99, extra_args=share.as_args())
    return Request(name, [0] * tokens, params, None, priority=priority)


class Steps:
    """Computes one chunk of one prompt per step, by one of the two policies."""

    def __init__(self, *, shortest: bool) -> None:
        board = MetricsBoard(None, "scheduler0")
        self._shortest = shortest
        self._prompts = FairPrompts(
            partial(PrefillOrder, lambda request: 0, board) if shortest else None
        )
        self.unread: list[Request] = []
        self.log: list[tuple[str, int]] = []
        """Name and tokens of each chunk."""

    def add(self, name: str, tokens: int, share: KeyShare, priority: int = 0) -> Request:
        request = _request(name, tokens, share, priority)
        self.unread.append(request)
        self._prompts.add(request)
        return request

    def step(self) -> str:
        request = self._next()
        tokens = min(CHUNK, request.num_tokens - request.num_computed_tokens)
        self._prompts.computed([(request, tokens)], self.unread)
        request.num_computed_tokens += tokens
        self.log.append((request.request_id, tokens))
        if request.num_computed_tokens == request.num_tokens:
            self.unread.remove(request)
        return request.request_id

    def end(self, request: Request, answer: int = 0) -> None:
        if request in self.unread:
            self.unread.remove(request)
        request.append_output_token_ids([0] * answer)
        self._prompts.ended(request)

    def _next(self) -> Request:
        running = [r for r in self.unread if r.num_computed_tokens]
        waiting = [r for r in self.unread if not r.num_computed_tokens]
        if self._shortest:
            return self._prompts.first(running, 1, lambda request: True)[0]
        if running:
            return running[0]
        behind = self._prompts.behind_first_key(waiting, lambda request: True)
        return next(request for request in waiting if request not in behind)


@pytest.mark.parametrize("shortest", [True, False])
@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.5, 1, 2, 5]), min_size=2, max_size=4),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=6),
)
def test_keys_with_waiting_prompts_get_tokens_in_proportion_to_their_weights(
    shortest: bool, weights: list[float], lengths: list[int]
) -> None:
    steps = Steps(shortest=shortest)
    shares = [KeyShare(number, weight) for number, weight in enumerate(weights, 1)]
    for number in range(120):
        for share in shares:
            steps.add(f"{share.number}/{number}", lengths[number % len(lengths)], share)
    computed = dict.fromkeys(range(1, len(weights) + 1), 0)
    # A prompt is read to its end with fcfs: it is the unit of service.
    unit = CHUNK if shortest else max(lengths)
    for _ in range(100):
        name = steps.step()
        key = int(name.split("/")[0])
        computed[key] += steps.log[-1][1]
        served = [computed[share.number] / share.weight for share in shares]
        # The bound of start-time fair queueing (Goyal et al. 1996, theorem 1).
        for one, a in zip(served, shares, strict=True):
            for other, b in zip(served, shares, strict=True):
                assert abs(one - other) <= unit / a.weight + unit / b.weight


@pytest.mark.parametrize("shortest", [True, False])
def test_a_key_that_was_away_comes_next_and_has_saved_nothing_up(shortest: bool) -> None:
    steps = Steps(shortest=shortest)
    flood, quiet = KeyShare(1), KeyShare(2)
    steps.end(steps.add("quiet/before", 10, quiet))
    for number in range(40):
        steps.add(f"flood/{number:02}", 60, flood)
    for _ in range(20):
        steps.step()
    for number in range(4):
        steps.add(f"quiet/{number}", 60, quiet)
    names = [steps.step().split("/")[0] for _ in range(8)]
    assert names[0] == "quiet"
    assert names.count("quiet") == 4, names


def test_a_long_prompt_of_one_key_is_overtaken_by_the_prompts_of_another() -> None:
    steps = Steps(shortest=True)
    steps.add("document", 64 * 10, KeyShare(1))
    steps.step()
    steps.add("other document", 64 * 3, KeyShare(2))
    order = [steps.step() for _ in range(6)]
    assert order.count("other document") == 3


def test_priorities_and_lengths_order_the_prompts_of_one_key_only() -> None:
    steps = Steps(shortest=True)
    steps.add("a/long", 64, KeyShare(1))
    steps.add("a/short", 20, KeyShare(1))
    steps.add("a/first", 64, KeyShare(1), FIRST_PRIORITY)
    steps.add("a/second", 64, KeyShare(1), FIRST_PRIORITY)
    steps.add("b", 64, KeyShare(2))
    order = [steps.step() for _ in range(5)]
    assert [name for name in order if name != "b"] == ["a/first", "a/second", "a/short", "a/long"]
    assert order.index("b") <= 1


def test_answers_count_for_the_next_prompts() -> None:
    steps = Steps(shortest=True)
    talker = steps.add("talker", 10, KeyShare(1))
    steps.add("other", 10, KeyShare(2))
    steps.step()
    steps.step()
    answer = 50
    for number in range(20):
        steps.add(f"other/{number:02}", 10, KeyShare(2))
        steps.add(f"talker/{number:02}", 10, KeyShare(1))
    steps.end(talker, answer)
    names = [steps.step().split("/")[0] for _ in range(11)]
    # 100 more tokens of the other key come first: ten prompts.
    assert names.count("other") == OUTPUT_COST * answer // 10


def test_background_requests_are_neither_ordered_nor_charged() -> None:
    steps = Steps(shortest=False)
    background = steps.add("line", 10, KeyShare(1), BACKGROUND_PRIORITY)
    steps.add("a", 10, KeyShare(1))
    steps.add("b", 10, KeyShare(2))
    behind = steps._prompts.behind_first_key(steps.unread, lambda request: True)
    assert background not in behind and len(behind) == 1
    steps.end(background, 90)
    first = behind[0].request_id
    assert [steps.step() for _ in range(2)] == ["a", first]


@pytest.mark.parametrize(
    "args", [None, {}, {SHARE_ARGS: 3}, {SHARE_ARGS: [1]}, {SHARE_ARGS: [1, 0]}, {SHARE_ARGS: "ab"}]
)
def test_a_request_without_a_valid_share_has_the_queue_of_requests_without_a_key(
    args: dict[str, object] | None,
) -> None:
    assert KeyShare.of(args) == KeyShare()


def test_the_share_of_a_pooling_request_is_read() -> None:
    prompts = FairPrompts(None)
    share = KeyShare(7, 2.0)
    for name, one in (("a", share), ("b", KeyShare(8))):
        params = PoolingParams(extra_kwargs=one.as_args())
        request = Request(name, [0] * 5, None, params)
        prompts.add(request)
        prompts.computed([(request, 5)], [])
    again = [Request("c", [0], None, PoolingParams(extra_kwargs=KeyShare(8).as_args()))]
    again.append(Request("d", [0], None, PoolingParams(extra_kwargs=share.as_args())))
    for request in again:
        prompts.add(request)
    # 5 tokens over a weight of 2 are less than 5 over 1.
    assert prompts.behind_first_key(again, lambda request: True) == again[:1]
