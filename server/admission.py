"""Admission of work: permits for answers, and the time after which rejected clients retry.

A request acquires a permit before its body is parsed. The permit grows to the number of the body's
answers and is released after the last byte. Permits of the tier flex are counted apart. Used from
the event loop only. Invariant: `in_flight` is the sum of the weights of all permits but those of
flex, `flex_in_flight` of those, and neither exceeds `limit`.
The permits are divided between the API keys (`PermitShares`).

Limits of an API key are requests in flight, requests and tokens per minute. A request counts when
its head arrives. Its tokens are reserved once its prompt is known: the prompt and the most that the
answer may have. The reservation becomes what was used when the request ends. Invariant: a refused
request takes nothing, so that `Retry-After` is exact for a client that is alone with its key.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from server.errors import OverloadedError, RateLimitError

MIN_WAITING = 32
"""Least number of waiting answers where `max_in_flight` is derived."""

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_SPREAD = 1.5
_NEWEST_SHARE = 0.1
"""Weight of the newest permit in the mean time that permits are held."""
_REFUSED_OVER_S = 10.0
_KEPT = 4
"""One of so many permits is kept for the API keys."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of an engine: sequences per step, and waiting prompt tokens (None: no limit).

    `decode_buckets` are the rows of its decode graphs, ascending; empty for pooling models.
    """

    max_num_seqs: int
    max_queued_tokens: int | None
    decode_buckets: tuple[int, ...] = ()


class Admission:
    """Issues permits up to a limit."""

    def __init__(
        self, max_in_flight: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_in_flight` None derives the limit from the engine; `clock` is in seconds."""
        self.in_flight = 0
        self.flex_in_flight = 0
        self.limit = 0
        self.max_queued_tokens: int | None = None
        self.rows: tuple[int, ...] = ()
        self.keys = KeyLedger()
        """Use of the API keys' own limits."""
        self._shares: PermitShares | None = None
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._held_s: float | None = None
        self._since: dict[Permit, float] = {}
        self._refused = _Recent(_REFUSED_OVER_S)

    def open(self, capacity: Capacity) -> None:
        """Start issuing permits for an engine of this capacity."""
        runs = capacity.max_num_seqs
        self.limit = self._max_in_flight or runs + max(runs, MIN_WAITING)
        self.max_queued_tokens = capacity.max_queued_tokens
        self.rows = capacity.decode_buckets or (runs,)

    def divide(self, weights: Callable[[], Mapping[str, float]]) -> None:
        """Divide the permits between API keys by their `weights` (by owner)."""
        self._shares = PermitShares(weights)

    def check(self, owner: str = "", more: int = 1, weight: int = 1) -> None:
        """Raise `OverloadedError` unless `more` permits are free for a request of `weight`."""
        if self.in_flight + more > self.limit:
            raise self._refusal(weight)
        if self._shares is not None and not self._shares.fits(owner, more, self.limit):
            raise self._refusal(weight, kept="; the free permits are kept for other API keys")

    def acquire(self, owner: str = "") -> Permit:
        """Return a permit for one answer to the owner of a key. Raises `OverloadedError`."""
        self.check(owner)
        self._count(owner, 1)
        permit = Permit(self, owner)
        self._since[permit] = self._clock()
        return permit

    def resize(self, owner: str, weight_before: int, weight: int) -> int:
        """Return the new weight of a permit of weight `weight_before`. Raises `OverloadedError`.

        A request for more answers than the limit counts as the limit: it is served alone.
        """
        weight = min(weight, self.limit)
        # It needs all permits, so those that are kept for other keys are not kept from it.
        if weight < self.limit or self.in_flight > weight_before:
            self.check(owner, weight - weight_before, weight)
        self._count(owner, weight - weight_before)
        return weight

    def move_to_flex(self, permit: Permit) -> None:
        """Count a permit among those of flex. Raises `OverloadedError`."""
        if self.flex_in_flight + permit.weight > self.limit:
            raise self._refusal(permit.weight, self.flex_in_flight, " of the tier flex")
        self._count(permit.owner, -permit.weight)
        self.flex_in_flight += permit.weight
        del self._since[permit]

    def free(self, permit: Permit) -> None:
        """Free the weight of a permit that is not one of flex."""
        self._count(permit.owner, -permit.weight)
        held_s = self._clock() - self._since.pop(permit)
        if self._held_s is None:
            self._held_s = held_s
        self._held_s += _NEWEST_SHARE * (held_s - self._held_s)

    def retry_after_s(self) -> float:
        """Return after how many seconds a rejected client should retry, 1 to 60, jittered.

        By then as many answers should be complete as were refused lately: with all permits taken,
        one comes back every mean time that they are held, divided by their number. What was
        completed lately would say less: after a quiet time it is little. Before the first answer
        is complete, the mean time is that which the oldest permit has been held so far.
        """
        now = self._clock()
        held_s = self._held_s
        if held_s is None:
            held_s = now - next(iter(self._since.values()), now)
        seconds = self._refused.count(now) * held_s / max(self.limit, 1)
        # Spread, so that those who were refused together do not come back together.
        return min(max(seconds, _MIN_RETRY_S), _MAX_RETRY_S / _SPREAD) * random.uniform(1, _SPREAD)

    def _count(self, owner: str, more: int) -> None:
        self.in_flight += more
        if self._shares is not None:
            self._shares.add(owner, more)

    def _refusal(
        self, weight: int, in_use: int | None = None, of: str = "", kept: str = ""
    ) -> OverloadedError:
        self._refused.add(weight, self._clock())
        more = "" if weight == 1 else f" and {weight} more are requested"
        in_use = self.in_flight if in_use is None else in_use
        return OverloadedError(
            f"The server is busy: {in_use} answers{of} run or wait{more}, and at most "
            f"{self.limit} may (--max-in-flight){kept}.",
            rejection="in_flight",
            retry_after_s=self.retry_after_s(),
        )


@dataclass(eq=False, slots=True)
class Permit:
    """A permit for `weight` answers at once; `release` is idempotent."""

    admission: Admission
    owner: str
    weight: int = 1
    is_flex: bool = False

    def grow(self, weight: int) -> None:
        """Set the number of answers. Raises `OverloadedError`."""
        if weight != self.weight:
            self.weight = self.admission.resize(self.owner, self.weight, weight)

    def move_to_flex(self) -> None:
        """Count the permit among those of the tier flex. Raises `OverloadedError`."""
        self.admission.move_to_flex(self)
        self.is_flex = True

    def release(self) -> None:
        if self.is_flex:
            self.admission.flex_in_flight -= self.weight
            self.weight = 0
        if self.weight:
            self.admission.free(self)
            self.weight = 0


class _Recent:
    """A count in which an event weighs less the longer ago it was."""

    __slots__ = ("_at", "_over_s", "_value")

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._value = 0.0
        self._at = 0.0

    def add(self, number: int, now: float) -> None:
        self._value = self.count(now) + number
        self._at = now

    def count(self, now: float) -> float:
        return self._value * math.exp((self._at - now) / self._over_s) if self._value else 0.0


class PermitShares:
    """Counts the permits of each owner, and divides them. Invariant: the counts are positive.

    A quarter of the permits is kept for the keys, by their weights. The other permits are for every
    request. So a key that floods the server leaves permits to the others, and a key alone on a
    server with one key has all of them.
    """

    def __init__(self, weights: Callable[[], Mapping[str, float]]) -> None:
        """`weights` returns the current weights of the keys by owner."""
        self._weights = weights
        self._permits: Counter[str] = Counter()

    def fits(self, owner: str, more: int, limit: int) -> bool:
        """Return whether `owner` may take `more` permits of `limit`; less than 1 always fits.

        The permits that are free in total are not checked.
        """
        total = self._permits.total() + more
        if more <= 0 or total <= limit - limit // _KEPT:
            return True
        weights = self._weights()
        if len(weights) < 2:
            return True
        total_weight = sum(weights.values())
        kept_permits = {key: int(limit * w / total_weight / _KEPT) for key, w in weights.items()}
        permits = {**self._permits, owner: self._permits[owner] + more}
        beyond = sum(max(0, number - kept_permits.get(key, 0)) for key, number in permits.items())
        return permits[owner] <= kept_permits.get(owner, 0) or beyond <= limit - sum(
            kept_permits.values()
        )

    def add(self, owner: str, more: int) -> None:
        """Count `more` permits of `owner`; negative ones are released."""
        self._permits[owner] += more
        if not self._permits[owner]:
            del self._permits[owner]


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
        self.clock = clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        self.in_flight: Counter[str] = Counter()
        """Requests in flight by name of the key."""
        self.in_flight_of_owner: Counter[str] = Counter()

    def use(self, owner: str, name: str, limits: KeyLimits) -> KeyUse:
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
        rates = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                left = max(0, math.floor(bucket.level(now)))
                rates[name] = RateState(bucket.limit, left, bucket.wait_s(bucket.limit, now))
        return rates

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
            seconds = now + rate.reset_s
            moment = datetime.fromtimestamp(math.ceil(seconds), tz=UTC)
            reset = moment.isoformat().replace("+00:00", "Z")
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
