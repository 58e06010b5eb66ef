"""Limits of API keys: requests in flight, requests and tokens per minute, and weights.

A request takes a place in flight and one request when its head arrives. Its tokens are reserved
once its prompt is known: the prompt and the most that the answer may have. The reservation becomes
what was used when the request ends. Used from the event loop only. Invariant: a refused request
takes nothing, so that `Retry-After` is exact for a client that is alone with its key.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from server.errors import RateLimitError

MAX_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of a key, None for no limit, and the weight of its share of the permits.

    A token per minute is one of a prompt or of an answer.
    """

    max_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0

    def changed(self, options: Iterable[str]) -> KeyLimits:
        """Return these limits with `options` such as `rpm:60`. Raises `ValueError`."""
        values: dict[str, Any] = {}
        for option in options:
            name, _, text = option.partition(":")
            if name not in _OPTIONS:
                raise ValueError(f"{name!r} is no limit; known: {', '.join(_OPTIONS)}")
            field, read = _OPTIONS[name]
            try:
                values[field] = read(text)
            except ValueError as error:
                raise ValueError(f"{name}: {error}, got {text!r}") from None
        return replace(self, **values)


NO_LIMITS = KeyLimits()


def _limit(text: str) -> int | None:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("must be a whole number, 0 for no limit")
    return int(text) or None


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight <= MAX_WEIGHT:
        raise ValueError(f"must be a number above 0, at most {MAX_WEIGHT:g}")
    return weight


_OPTIONS: Mapping[str, tuple[str, Callable[[str], float | None]]] = {
    "in-flight": ("max_in_flight", _limit),
    "rpm": ("requests_per_minute", _limit),
    "tpm": ("tokens_per_minute", _limit),
    "weight": ("weight", _weight),
}


_MINUTE_S = 60.0


class TokenBucket:
    """Holds at most `limit` units and gains `limit` per minute, continuously.

    It may hold less than nothing: work whose size is known only at its end is charged then.
    Times are in seconds of one monotonic clock.
    """

    __slots__ = ("_at", "_level", "limit")

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at = now

    def level(self, now: float) -> float:
        gained = (now - self._at) * self.limit / _MINUTE_S
        return min(self._level + gained, self.limit)

    def wait_s(self, units: float, now: float) -> float:
        """Return in how many seconds `units` are at hand, 0 if they are.

        More units than the limit are there once the bucket is full.
        """
        missing = min(units, self.limit) - self.level(now)
        return max(missing, 0.0) * _MINUTE_S / self.limit

    def take(self, units: float, now: float) -> None:
        """Remove `units`; negative ones are returned to the bucket."""
        self._level = min(self.level(now) - units, self.limit)
        self._at = now

    def resize(self, limit: int, now: float) -> None:
        """Change the limit; what was taken from the bucket stays taken."""
        self._level = self.level(now) + limit - self.limit
        self._at = now
        self.limit = limit


@dataclass(frozen=True, slots=True)
class RateState:
    """Limit of one rate, the units left, and the seconds until all of them are left."""

    limit: int
    remaining: int
    reset_s: float


class KeyLedger:
    """The accounts of all keys; keys of one owner share one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is in seconds."""
        self.clock = clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        self.in_flight: Counter[str] = Counter()
        """Requests in flight by name of the key."""
        self.in_flight_of_owner: Counter[str] = Counter()

    def use(self, owner: str, name: str, limits: KeyLimits) -> KeyUse:
        """Return the use that a new request will make of its key."""
        now = self.clock()
        requests = self._bucket(owner, "requests", limits.requests_per_minute, now)
        tokens = self._bucket(owner, "tokens", limits.tokens_per_minute, now)
        return KeyUse(self, owner, name, requests, tokens)

    def charge(self, owner: str, limits: KeyLimits, tokens: int) -> None:
        """Charge tokens of work that was not checked before, such as a background response."""
        now = self.clock()
        bucket = self._bucket(owner, "tokens", limits.tokens_per_minute, now)
        if bucket is not None:
            bucket.take(tokens, now)

    def _bucket(self, owner: str, rate: str, limit: int | None, now: float) -> TokenBucket | None:
        """Return the bucket of an owner with this `limit`, which may have changed; or None."""
        if limit is None:
            self._buckets.pop((owner, rate), None)
            return None
        bucket = self._buckets.get((owner, rate))
        if bucket is None:
            bucket = self._buckets[owner, rate] = TokenBucket(limit, now)
        elif bucket.limit != limit:
            bucket.resize(limit, now)
        return bucket


class KeyUse:
    """The use that one request makes of its key, from `enter` to `end`."""

    __slots__ = ("_entered", "_ledger", "_name", "_owner", "_requests", "_reserved", "_tokens")

    def __init__(
        self,
        ledger: KeyLedger,
        owner: str,
        name: str,
        requests: TokenBucket | None,
        tokens: TokenBucket | None,
    ) -> None:
        """A bucket is None without a limit."""
        self._ledger = ledger
        self._owner = owner
        self._name = name
        self._requests = requests
        self._tokens = tokens
        self._reserved = 0
        self._entered = False

    def enter(self, max_in_flight: int | None) -> None:
        """Take a place in flight and one request. Raises `RateLimitError`."""
        now = self._ledger.clock()
        in_flight = self._ledger.in_flight_of_owner[self._owner]
        if max_in_flight is not None and in_flight >= max_in_flight:
            raise RateLimitError(
                f"The API key {self._name!r} has {in_flight} requests in flight; at most "
                f"{max_in_flight} are allowed.",
                rejection="key_in_flight",
            )
        if self._requests is not None:
            self._check(self._requests, 1, "requests", now)
            self._requests.take(1, now)
        self._count(1)
        self._entered = True

    def _count(self, more: int) -> None:
        self._ledger.in_flight_of_owner[self._owner] += more
        self._ledger.in_flight[self._name] += more

    def reserve(self, tokens: int, *, refusable: bool = True) -> None:
        """Reserve tokens of one more prompt and of its answers. Raises `RateLimitError`.

        A request for more tokens than the limit passes with a full bucket and leaves a debt.
        Without `refusable`, as for a request whose answer has begun, it may get a debt, too.
        """
        bucket = self._tokens
        if bucket is None or not self._entered:
            return
        now = self._ledger.clock()
        if refusable:
            total = self._reserved + tokens
            # What is reserved counts as at hand, so that the last prompt fits if all of them fit.
            needed = min(total, bucket.limit) - self._reserved
            self._check(bucket, needed, "tokens", now, f" this request reserves {total} and")
        bucket.take(tokens, now)
        self._reserved += tokens

    def refund(self) -> None:
        """Return the request to its rate, if it took one: it was refused."""
        if self._entered and self._requests is not None:
            self._requests.take(-1, self._ledger.clock())

    def end(self, used: int) -> None:
        """Replace the reservation by the `used` tokens and free the place in flight; idempotent."""
        if not self._entered:
            return
        self._entered = False
        self._count(-1)
        if self._tokens is not None:
            self._tokens.take(used - self._reserved, self._ledger.clock())

    def rates(self) -> dict[str, RateState]:
        """Return the state of each limited rate: `requests`, `tokens`."""
        now = self._ledger.clock()
        buckets = {"requests": self._requests, "tokens": self._tokens}
        return {
            name: RateState(
                bucket.limit,
                max(0, math.floor(bucket.level(now))),
                bucket.wait_s(bucket.limit, now),
            )
            for name, bucket in buckets.items()
            if bucket is not None
        }

    def _check(
        self, bucket: TokenBucket, needed: float, unit: str, now: float, more: str = ""
    ) -> None:
        """Raise `RateLimitError` unless `needed` units are at hand."""
        wait_s = bucket.wait_s(needed, now)
        if wait_s > 0:
            left = max(0, math.floor(bucket.level(now)))
            raise RateLimitError(
                f"The API key {self._name!r} has a limit of {bucket.limit} {unit} per minute:"
                f"{more} {left} are left.",
                rejection=f"key_{unit}",
                # Rounded up: a part of a millisecond before, they are not there.
                retry_after_s=math.ceil(wait_s * 1000) / 1000,
            )


_FIELDS = ("limit", "remaining", "reset")


def rate_headers(
    rates: Mapping[str, RateState], *, anthropic: bool, wall_s: float | None = None
) -> dict[str, str]:
    """Return the headers of the limited rates; `wall_s` is the time of day as `time.time`."""
    headers: dict[str, str] = {}
    now = time.time() if wall_s is None else wall_s
    for unit, rate in rates.items():
        if anthropic:
            names = [f"anthropic-ratelimit-{unit}-{field}" for field in _FIELDS]
            reset = _time_of_day(now + rate.reset_s)
        else:
            names = [f"x-ratelimit-{field}-{unit}" for field in _FIELDS]
            reset = duration(rate.reset_s)
        headers.update(zip(names, (str(rate.limit), str(rate.remaining), reset), strict=True))
    return headers


def duration(seconds: float) -> str:
    """Return a time span as OpenAI writes it: `12ms`, `1.5s`, `6m0s`; rounded up."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    shown = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{shown}" if minutes else shown


def _time_of_day(seconds: float) -> str:
    """Return a time as RFC 3339 in whole seconds, rounded up."""
    moment = datetime.fromtimestamp(math.ceil(seconds), tz=UTC)
    return moment.isoformat().replace("+00:00", "Z")
