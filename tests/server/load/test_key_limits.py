"""Limits of a key: what is taken, when it is back, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.admission import (
    NO_LIMITS,
    KeyLedger,
    KeyLimits,
    KeyUse,
    RateState,
    TokenBucket,
    duration,
    rate_headers,
)
from server.errors import RateLimitError
from tests.server.load.test_admission import Clock


class Client:
    """Makes requests of one key."""

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
