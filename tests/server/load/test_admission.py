"""Permits: how many, what they weigh, when a refused client comes back."""

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.admission import (
    NO_LIMITS,
    Admission,
    Capacity,
    KeyLedger,
    KeyLimits,
    KeyUse,
    PermitShares,
    RateState,
    TokenBucket,
    duration,
    rate_headers,
)
from server.errors import OverloadedError, RateLimitError
from server.request.endpoints import answers_in
from server.wire import Endpoint
from tests.server.scripted import Running, running


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


# --------------------------------------------------------------------------------------- key limits
class Client:
    def __init__(self, limits: KeyLimits) -> None:
        self.clock = Clock()
        self.ledger = KeyLedger(self.clock)
        self.limits = limits

    def request(self) -> KeyUse:
        use = self.ledger.use("alice", "alice", self.limits)
        use.enter(self.limits.max_in_flight)
        return use

    def remaining(self) -> dict[str, int]:
        rates = self.ledger.use("alice", "alice", self.limits).rates()
        return {name: rate.remaining for name, rate in rates.items()}


def _wait_s(error: RateLimitError) -> float:
    return int(error.headers["retry-after-ms"]) / 1000


def test_requests_per_minute_come_back_one_by_one() -> None:
    client = Client(KeyLimits(requests_per_minute=6))
    for _ in range(6):
        client.request().end(0)
    with pytest.raises(RateLimitError, match=r"'alice' has a limit of 6 requests per minute: 0"):
        client.request()
    client.clock.now += 10
    client.request()
    with pytest.raises(RateLimitError) as caught:
        client.request()
    assert caught.value.rejection == "key_requests"
    assert caught.value.headers["retry-after"] == "10"


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(1, 5000),
    pauses=st.lists(st.floats(0, 30), min_size=1, max_size=20),
    tokens=st.integers(1, 9000),
)
def test_a_refused_client_is_served_at_the_given_time_and_not_before(
    limit: int, pauses: list[float], tokens: int
) -> None:
    client = Client(KeyLimits(tokens_per_minute=limit))
    for pause in pauses:
        client.clock.now += pause
        use = client.request()
        try:
            use.reserve(tokens)
        except RateLimitError as error:
            wait_s = _wait_s(error)
            client.clock.now += wait_s - 0.002
            with pytest.raises(RateLimitError):
                use.reserve(tokens)
            # The message's clock starts at the refusal.
            client.clock.now += 0.002 + 1e-9
            use.reserve(tokens)
        use.end(tokens)


def test_a_reservation_becomes_what_was_used() -> None:
    client = Client(KeyLimits(tokens_per_minute=1000))
    use = client.request()
    use.reserve(700)
    assert client.remaining() == {"tokens": 300}
    with pytest.raises(RateLimitError, match="this request reserves 400 and 300 are left"):
        client.request().reserve(400)
    use.end(120)
    use.end(120)
    assert client.remaining() == {"tokens": 880}


def test_a_request_beyond_the_limit_passes_alone_and_leaves_a_debt() -> None:
    client = Client(KeyLimits(tokens_per_minute=100))
    use = client.request()
    # Two prompts of one request.
    use.reserve(90)
    use.reserve(60)
    use.end(150)
    with pytest.raises(RateLimitError) as caught:
        client.request().reserve(1)
    assert _wait_s(caught.value) == pytest.approx(51 * 0.6)
    assert client.remaining() == {"tokens": 0}


def test_an_answer_that_has_begun_is_charged_without_a_check() -> None:
    client = Client(KeyLimits(tokens_per_minute=100))
    use = client.request()
    use.reserve(100)
    use.reserve(50, refusable=False)
    client.ledger.charge("alice", client.limits, 10)
    use.end(150)
    client.clock.now += 36
    assert client.remaining() == {"tokens": 0}
    client.clock.now += 1
    assert client.remaining() == {"tokens": 1}


def test_places_in_flight_come_back_at_the_end() -> None:
    client = Client(KeyLimits(max_in_flight=2))
    first, _ = client.request(), client.request()
    with pytest.raises(RateLimitError, match=r"2 requests in flight; at most 2") as caught:
        client.request()
    assert caught.value.rejection == "key_in_flight"
    first.end(0)
    client.request()
    assert client.ledger.in_flight == {"alice": 2}


def test_a_refused_request_gives_its_request_back() -> None:
    client = Client(KeyLimits(requests_per_minute=5))
    use = client.request()
    use.refund()
    use.end(0)
    assert client.remaining() == {"requests": 5}
    refused = client.ledger.use("alice", "alice", client.limits)
    refused.refund()
    refused.end(3)
    assert client.remaining() == {"requests": 5}


def test_a_changed_limit_applies_to_what_was_taken() -> None:
    client = Client(KeyLimits(tokens_per_minute=100))
    client.request().reserve(60)
    client.limits = KeyLimits(tokens_per_minute=200)
    assert client.remaining() == {"tokens": 140}
    client.limits = KeyLimits(tokens_per_minute=50)
    assert client.remaining() == {"tokens": 0}
    client.limits = NO_LIMITS
    assert client.remaining() == {}


def test_a_bucket_never_holds_more_than_a_minute() -> None:
    bucket = TokenBucket(60, now=0)
    bucket.take(30, 0)
    assert bucket.level(10) == 40
    assert bucket.level(1000) == 60
    bucket.take(-10, 1000)
    assert bucket.level(1000) == 60
    assert bucket.wait_s(61, 1000) == 0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0ms"), (0.0111, "12ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (360, "6m0s")],
)
def test_durations_have_the_form_of_openai(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_headers_have_the_forms_of_both_apis() -> None:
    rates = {"requests": RateState(60, 59, 1.0), "tokens": RateState(1000, 0, 60.0)}
    assert rate_headers(rates, anthropic=False) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m0s",
    }
    assert rate_headers({"tokens": rates["tokens"]}, anthropic=True, wall_s=0.5) == {
        "anthropic-ratelimit-tokens-limit": "1000",
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": "1970-01-01T00:01:01Z",
    }


def test_options_change_the_defaults() -> None:
    defaults = KeyLimits(max_in_flight=9, tokens_per_minute=5)
    limits = defaults.changed(["rpm:60", "tpm:0", "weight:2.5"])
    assert limits == KeyLimits(9, 60, None, 2.5)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("rps:1", "'rps' is no limit; known: in-flight, rpm, tpm, weight"),
        ("rpm:1.5", "rpm: must be a whole number, 0 for no limit, got '1.5'"),
        ("weight:0", "weight: must be a number above 0, at most 1000, got '0'"),
    ],
)
def test_a_wrong_option_names_what_is_accepted(option: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NO_LIMITS.changed([option])


# ----------------------------------------------------------------------------------------- overload
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


async def fill(service: Running, number: int, **body: object) -> list[asyncio.Task[httpx.Response]]:
    """Start requests that wait, and return once they all hold their permits."""
    before = await service.metric("rbln_admission_in_flight")
    tasks = [
        asyncio.create_task(service.client.post(CHAT, json={"do": "wait", **body}))
        for _ in range(number)
    ]
    weight = int(body.get("n", 1))  # type: ignore[call-overload]
    await service.until("rbln_admission_in_flight", before + number * weight)
    return tasks


async def refused(service: Running, **body: object) -> httpx.Response:
    answer = await service.client.post(CHAT, json={"do": "answer", **body})
    assert answer.status_code == 429, answer.text
    assert answer.json()["error"]["code"] == "overloaded"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert 1000 <= int(answer.headers["retry-after-ms"]) <= 60_000
    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_rejections_above_the_limit_say_when_to_retry(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path, max_in_flight=3) as service:
        held = await fill(service, 3, stream=stream)
        answer = await refused(service)
        assert "at most 3 may (--max-in-flight)" in answer.json()["error"]["message"]
        # Nothing of the body was looked at, and nothing but requests for the engine is refused.
        broken = await service.client.post(CHAT, content=b"{", headers=JSON)
        assert broken.status_code == 429
        assert (await service.client.get("/v1/models")).status_code == 200
        assert (await service.client.get("/readyz")).status_code == 200
        service.frontend.go_on.set()
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200] * 3
        assert await service.metric("rbln_admission_in_flight") == 0
        reasons = 'rbln_admission_rejections_total{reason="in_flight"}'
        assert await service.metric(reasons) == 2
        assert await service.metric("rbln_admission_max_in_flight") == 3
        assert (await service.client.post(CHAT, json={"do": "answer"})).status_code == 200


async def test_every_answer_of_n_counts(tmp_path: Path) -> None:
    async with running(tmp_path, max_in_flight=4) as service:
        held = await fill(service, 1, n=3)
        await refused(service, n=2)
        assert (await service.client.post(CHAT, json={"do": "answer"})).status_code == 200
        service.frontend.go_on.set()
        await asyncio.gather(*held)
        assert await service.metric("rbln_admission_in_flight") == 0


WAYS_OUT: list[tuple[bytes, int]] = [
    (b'{"do":"answer"}', 200),
    (b'{"do":"answer","stream":true}', 200),
    (b'{"do":"refuse"}', 400),
    (b'{"do":"refuse","stream":true}', 400),
    (b'{"do":"break"}', 500),
    (b'{"do":"break","stream":true}', 200),
    (b"{", 400),
    (b"[]", 400),
]


async def test_permits_come_back_on_every_way_out(tmp_path: Path) -> None:
    async with running(tmp_path, max_in_flight=1) as service:
        for content, status in WAYS_OUT * 2:
            answer = await service.client.post(CHAT, content=content, headers=JSON)
            assert answer.status_code == status, content
            assert await service.metric("rbln_admission_in_flight") == 0
        for stream in (False, True):
            (held,) = await fill(service, 1, stream=stream)
            held.cancel()
            while await service.metric("rbln_admission_in_flight"):
                await asyncio.sleep(0.01)
        assert (await service.client.post(CHAT, json={"do": "answer"})).status_code == 200


async def send_half(service: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a head and the beginning of a body, and return once the server waits for the rest."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n{" % CHAT.encode()
    )
    await writer.drain()
    await service.until("rbln_serve_in_flight_requests")
    return reader, writer


async def test_a_slow_body_holds_no_permit_and_times_out(tmp_path: Path) -> None:
    async with running(tmp_path, max_in_flight=1, body_timeout_s=0.5) as service:
        reader, writer = await send_half(service)
        assert (await service.client.post(CHAT, json={"do": "answer"})).status_code == 200
        # The server closes: the rest of the body would be taken for the next request.
        head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        error = json.loads(body)["error"]
        assert error["code"] == "body_timeout"
        assert "within 0.5 s." in error["message"]
        writer.close()


async def test_a_client_that_goes_while_it_sends_is_no_fault(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        _, writer = await send_half(service)
        writer.close()
        while await service.metric("rbln_serve_in_flight_requests"):
            await asyncio.sleep(0.01)
        counted = 'rbln_http_requests_total{code="499",method="POST",outcome="aborted"'
        assert await service.metric(counted) == 1


async def test_a_body_that_says_it_is_too_large_is_not_read(tmp_path: Path) -> None:
    async with running(tmp_path, max_body_bytes=2000) as service:
        answer = await service.client.post(CHAT, content=b" " * 2001, headers=JSON)
        assert answer.status_code == 413
        assert "2000 bytes (--max-body-bytes)" in answer.json()["error"]["message"]


def nested(depth: int) -> bytes:
    """A body with ``depth`` containers inside each other."""
    lists = depth - 1
    return b'{"do":"answer","x":' + b"[" * lists + b"]" * lists + b"}"


async def test_deep_bodies_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        service.frontend.max_json_depth = 10
        for content, status in [
            (nested(10), 200),
            (nested(11), 400),
            (b'{"do":"answer","x":"' + b"[" * 500 + b'"}', 200),
            (b'{"do":"answer","x":[' + b"[]," * 500 + b"[]]}", 200),
            (b'{"x":{"y":' * 8 + b"1" + b"}}" * 8, 400),
        ]:
            answer = await service.client.post(CHAT, content=content, headers=JSON)
            assert answer.status_code == status, content[:40]
        error = answer.json()["error"]
        assert error["code"] == "invalid_json"
        assert "the limit of 10." in error["message"]


DEADLINES: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "200", "X-Request-Timeout-Ms"),
    ({"max_request_s": 0.2}, None, "--max-request-s"),
    ({"max_request_s": 0.2}, "60000", "--max-request-s"),
    ({"max_request_s": 60}, "200", "X-Request-Timeout-Ms"),
]


@pytest.mark.parametrize(("settings", "asked_ms", "limit"), DEADLINES)
async def test_a_deadline_before_the_first_byte_is_a_504(
    tmp_path: Path, settings: dict[str, Any], asked_ms: str | None, limit: str
) -> None:
    headers = {} if asked_ms is None else {"X-Request-Timeout-Ms": asked_ms}
    async with running(tmp_path, **settings) as service:
        answer = await service.client.post(CHAT, json={"do": "wait"}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert f"0.2 s, the limit of {limit}" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert service.frontend.ended == ["answer aborted"]
        counted = 'rbln_http_requests_total{code="504",method="POST",outcome="timeout"'
        assert await service.metric(counted) == 1
        assert await service.metric("rbln_admission_in_flight") == 0


async def test_a_deadline_within_a_stream_ends_it_with_a_frame(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(
            CHAT, json={"do": "wait", "stream": True}, headers={"X-Request-Timeout-Ms": "200"}
        )
        assert answer.status_code == 200
        first, error, done, rest = answer.text.split("\n\n")
        assert first == "data: first"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert (done, rest) == ("data: [DONE]", "")
        assert service.frontend.ended == ["stream aborted"]
        counted = 'rbln_http_requests_total{code="200",method="POST",outcome="timeout"'
        assert await service.metric(counted) == 1


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "soon", "", "9" * 13, "²"])
async def test_a_timeout_must_be_a_positive_integer(tmp_path: Path, value: str) -> None:
    async with running(tmp_path) as service:
        headers = {b"X-Request-Timeout-Ms": value.encode("latin-1")}
        answer = await service.client.post(CHAT, json={"do": "answer"}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
        assert answer.json()["error"]["param"] == "X-Request-Timeout-Ms"


async def test_a_request_within_its_time_is_not_disturbed(tmp_path: Path) -> None:
    async with running(tmp_path, max_request_s=30) as service:
        for stream in (False, True):
            answer = await service.client.post(
                CHAT,
                json={"do": "answer", "stream": stream},
                headers={"X-Request-Timeout-Ms": "20000"},
            )
            assert answer.status_code == 200


# ------------------------------------------------------------------------------------ permit shares
def _flood(shares: PermitShares, owner: str, limit: int, taken: int = 0) -> int:
    number = 0
    while taken + number < limit and shares.fits(owner, 1, limit):
        shares.add(owner, 1)
        number += 1
    return number


def test_a_flood_leaves_each_other_key_its_part_by_weight() -> None:
    shares = PermitShares(lambda: {"flood": 1, "one": 1, "two": 2})
    assert _flood(shares, "flood", 64) == 64 - 4 - 8
    assert _flood(shares, "one", 64, 52) == 4
    assert _flood(shares, "two", 64, 56) == 8


def test_one_key_and_no_keys_have_all_permits() -> None:
    assert _flood(PermitShares(lambda: {"only": 1}), "only", 40) == 40
    assert _flood(PermitShares(dict), "", 40) == 40


def test_an_unknown_owner_leaves_what_is_kept() -> None:
    shares = PermitShares(lambda: {"one": 1, "two": 1})
    assert _flood(shares, "admin-1", 40) == 30


@settings(max_examples=100, deadline=None)
@given(
    weights=st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1, 3]), min_size=2),
    limit=st.integers(1, 70),
    moves=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(-3, 5)), max_size=80),
)
def test_a_key_below_its_part_always_fits(
    weights: dict[str, float], limit: int, moves: list[tuple[str, int]]
) -> None:
    shares, held = PermitShares(lambda: weights), Counter[str]()
    for owner, more in moves:
        more = max(more, -held[owner])
        if held.total() + more <= limit and shares.fits(owner, more, limit):
            shares.add(owner, more)
            held[owner] += more
        for key, weight in weights.items():
            part = int(limit * weight / sum(weights.values()) / 4)
            if held[key] < part:
                assert held.total() < limit and shares.fits(key, 1, limit)
