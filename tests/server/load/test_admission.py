"""Permits: how many, what they weigh, when a refused client comes back."""

from __future__ import annotations

import re
from typing import Any

import pytest

from server.admission import Admission, Capacity
from server.errors import OverloadedError
from server.request.endpoints import answers_in
from server.wire import Endpoint


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(limit: int | None = 4, max_num_seqs: int = 4) -> tuple[Admission, Clock]:
    clock = Clock()
    admission = Admission(limit, clock)
    admission.open(Capacity(max_num_seqs=max_num_seqs, max_queued_tokens=None))
    return admission, clock


def test_nothing_is_taken_before_the_engine_is_there() -> None:
    with pytest.raises(OverloadedError):
        Admission(8).acquire()


@pytest.mark.parametrize(("max_num_seqs", "limit"), [(1, 33), (4, 36), (32, 64), (256, 512)])
def test_the_limit_follows_from_the_engine(max_num_seqs: int, limit: int) -> None:
    assert opened(None, max_num_seqs)[0].limit == limit
    assert opened(3, max_num_seqs)[0].limit == 3


def test_permits_run_out_and_come_back() -> None:
    admission, _ = opened(2)
    first, second = admission.acquire(), admission.acquire()
    with pytest.raises(OverloadedError) as caught:
        admission.check()
    assert caught.value.rejection == "in_flight"
    assert "2 answers run or wait, and at most 2 may (--max-in-flight)" in caught.value.message
    first.release()
    first.release()
    assert admission.in_flight == 1
    admission.acquire().release()
    second.release()
    assert admission.in_flight == 0


def test_a_permit_grows_to_what_the_body_asks_for() -> None:
    admission, _ = opened(4)
    one, other = admission.acquire(), admission.acquire()
    one.grow(3)
    assert admission.in_flight == 4
    with pytest.raises(OverloadedError, match="4 answers run or wait and 2 more are requested"):
        other.grow(2)
    assert admission.in_flight == 4
    other.release()
    one.release()
    assert admission.in_flight == 0


def test_a_request_beyond_the_limit_is_served_alone() -> None:
    admission, _ = opened(4)
    one = admission.acquire()
    one.grow(256)
    assert admission.in_flight == 4
    one.release()
    admission.acquire()
    with pytest.raises(OverloadedError):
        admission.acquire().grow(256)


def test_the_time_to_come_back_follows_the_time_that_answers_take() -> None:
    admission, clock = opened(4)
    for _ in range(60):
        permit = admission.acquire()
        clock.now += 2
        permit.release()
    # Four at once would be two a second; no retry is delayed, also after a quiet time.
    assert admission.retry_after_s() <= 1.5
    clock.now += 600
    held = [admission.acquire() for _ in range(4)]
    times = []
    for _ in range(40):
        with pytest.raises(OverloadedError) as caught:
            admission.check()
        times.append(int(caught.value.headers["retry-after-ms"]) / 1000)
    assert 1 <= times[0] <= 1.5
    assert 15 < times[-1] < 50
    assert len(set(times[-10:])) > 5, "not jittered"
    assert max(times) <= 60
    clock.now += 60
    assert admission.retry_after_s() < times[-1]
    for permit in held:
        permit.release()


def test_before_the_first_answer_a_refusal_goes_by_how_long_the_oldest_runs() -> None:
    admission, clock = opened(4)
    held = [admission.acquire() for _ in range(4)]
    clock.now += 0.2
    with pytest.raises(OverloadedError) as caught:
        admission.check()
    assert re.search(r"Retry after [12] s\.$", caught.value.message)
    clock.now += 40
    for _ in range(8):
        with pytest.raises(OverloadedError) as caught:
            admission.check()
    assert int(caught.value.headers["retry-after"]) >= 40
    for permit in held:
        permit.release()


WEIGHTS: list[tuple[Endpoint, dict[str, Any], int]] = [
    (Endpoint.CHAT, {"messages": [{}] * 9}, 1),
    (Endpoint.CHAT, {"n": 3}, 3),
    (Endpoint.CHAT, {"n": "3"}, 1),
    (Endpoint.CHAT, {"n": True}, 1),
    (Endpoint.CHAT, {"n": -1}, 1),
    (Endpoint.COMPLETION, {"prompt": "a", "n": 2}, 2),
    (Endpoint.COMPLETION, {"prompt": [1, 2, 3]}, 1),
    (Endpoint.COMPLETION, {"prompt": ["a", "b"], "n": 2}, 4),
    (Endpoint.COMPLETION, {"prompt": [[1], [2], [3]]}, 3),
    (Endpoint.COMPLETION, {"prompt": []}, 1),
    (Endpoint.RESPONSES, {"input": [{}, {}]}, 1),
    (Endpoint.EMBEDDINGS, {"input": ["a", "b"]}, 2),
    (Endpoint.EMBEDDINGS, {"input": [{"role": "user"}, {"role": "user"}]}, 1),
    (Endpoint.EMBEDDINGS, {"input": [[{"role": "user"}], [{"role": "user"}]]}, 2),
    (Endpoint.RERANK, {"query": "q", "documents": ["a", "b", "c"]}, 3),
    (Endpoint.SCORE, {"text_1": "a", "text_2": ["b", "c"]}, 2),
    (Endpoint.COHERE_EMBED, {"texts": ["a", "b"]}, 2),
    (Endpoint.COHERE_EMBED, {"inputs": [{"content": []}] * 3}, 3),
    (Endpoint.EMBEDDINGS, {"messages": [[{"role": "user"}], [{"role": "user"}]]}, 2),
]


@pytest.mark.parametrize(("endpoint", "body", "weight"), WEIGHTS)
def test_answers_are_n_for_each_prompt(
    endpoint: Endpoint, body: dict[str, Any], weight: int
) -> None:
    assert answers_in(endpoint, body) == weight
