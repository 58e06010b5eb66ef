"""Requests in flight, requests and tokens per minute of each API key.

A request takes a place in flight and one request when its head arrives. Its tokens are reserved
once its prompt is known: the prompt and the most that the answer may have. The reservation becomes
what was used when the request ends. Used from the event loop only. Invariant: a refused request
takes nothing, so that `Retry-After` is exact for a client that is alone with its key.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from server.errors import RateLimitError
from server.key_limits.limits import KeyLimits
from server.key_limits.token_bucket import TokenBucket


@dataclass(frozen=True, slots=True)
class _Account:
    """State of one owner; a bucket is None without a limit."""

    owner: str
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None


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
        self._clock = clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        self.in_flight: Counter[str] = Counter()
        """Requests in flight by name of the key."""
        self.in_flight_of_owner: Counter[str] = Counter()

    def use(self, owner: str, name: str, limits: KeyLimits) -> KeyUse:
        """Return the use that a new request will make of its key."""
        now = self._clock()
        account = _Account(
            owner,
            self._bucket(owner, "requests", limits.requests_per_minute, now),
            self._bucket(owner, "tokens", limits.tokens_per_minute, now),
        )
        return KeyUse(self, account, name)

    def charge(self, owner: str, limits: KeyLimits, tokens: int) -> None:
        """Charge tokens of work that was not checked before, such as a background response."""
        now = self._clock()
        bucket = self._bucket(owner, "tokens", limits.tokens_per_minute, now)
        if bucket is not None:
            bucket.take(tokens, now)

    def now(self) -> float:
        """Return the clock's time in seconds."""
        return self._clock()

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

    __slots__ = ("_account", "_entered", "_ledger", "_name", "_reserved")

    def __init__(self, ledger: KeyLedger, account: _Account, name: str) -> None:
        self._ledger = ledger
        self._account = account
        self._name = name
        self._reserved = 0
        self._entered = False

    def enter(self, max_in_flight: int | None) -> None:
        """Take a place in flight and one request. Raises `RateLimitError`."""
        account, now = self._account, self._ledger.now()
        in_flight = self._ledger.in_flight_of_owner[account.owner]
        if max_in_flight is not None and in_flight >= max_in_flight:
            raise RateLimitError(
                f"The API key {self._name!r} has {in_flight} requests in flight; at most "
                f"{max_in_flight} are allowed.",
                rejection="key_in_flight",
            )
        if account.requests is not None:
            self._check(account.requests, 1, "requests", now)
            account.requests.take(1, now)
        self._count(1)
        self._entered = True

    def _count(self, more: int) -> None:
        self._ledger.in_flight_of_owner[self._account.owner] += more
        self._ledger.in_flight[self._name] += more

    def reserve(self, tokens: int, *, refusable: bool = True) -> None:
        """Reserve tokens of one more prompt and of its answers. Raises `RateLimitError`.

        A request for more tokens than the limit passes with a full bucket and leaves a debt.
        Without `refusable`, as for a request whose answer has begun, it may get a debt, too.
        """
        bucket = self._account.tokens
        if bucket is None or not self._entered:
            return
        now = self._ledger.now()
        if refusable:
            held = self._reserved
            # What it holds counts as at hand, so that its last prompt fits if all of them fit.
            wanted = min(held + tokens, bucket.limit) - held
            more = f" this request reserves {held + tokens} and"
            self._check(bucket, wanted, "tokens", now, more)
        bucket.take(tokens, now)
        self._reserved += tokens

    def forgive(self) -> None:
        """Return the request to its rate, if it took one: it was refused."""
        if self._entered and self._account.requests is not None:
            self._account.requests.take(-1, self._ledger.now())

    def end(self, used: int) -> None:
        """Replace the reservation by the `used` tokens and free the place in flight; idempotent."""
        if not self._entered:
            return
        self._entered = False
        self._count(-1)
        if self._account.tokens is not None:
            self._account.tokens.take(used - self._reserved, self._ledger.now())

    def rates(self) -> dict[str, RateState]:
        """Return the state of each limited rate: `requests`, `tokens`."""
        now = self._ledger.now()
        buckets = {"requests": self._account.requests, "tokens": self._account.tokens}
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
        self, bucket: TokenBucket, wanted: float, unit: str, now: float, more: str = ""
    ) -> None:
        """Raise `RateLimitError` unless `wanted` units are at hand."""
        wait_s = bucket.wait_s(wanted, now)
        if wait_s > 0:
            left = max(0, math.floor(bucket.level(now)))
            raise RateLimitError(
                f"The API key {self._name!r} has a limit of {bucket.limit} {unit} per minute:"
                f"{more} {left} are left.",
                rejection=f"key_{unit}",
                # Rounded up: a part of a millisecond before, they are not there.
                retry_after_s=math.ceil(wait_s * 1000) / 1000,
            )
