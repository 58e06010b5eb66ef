"""Admission of work: permits for answers, and the time after which rejected clients retry.

A request acquires a permit before its body is parsed. The permit grows to the number of the body's
answers and is released after the last byte. Permits of the tier flex are counted apart. Used from
the event loop only. Invariant: `in_flight` is the sum of the weights of all permits but those of
flex, `flex_in_flight` of those, and neither exceeds `limit`.
The permits are divided between the API keys (`PermitShares`).
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from server.errors import OverloadedError
from server.key_limits import KeyLedger

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
        self._shares = PermitShares(dict)
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

    def check(self, owner: str = "") -> None:
        """Raise `OverloadedError` if no permit is free for `owner`; cheaper than `acquire`."""
        self._check(owner, 1, 1)

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
            self._check(owner, weight - weight_before, weight)
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

    def _check(self, owner: str, more: int, weight: int) -> None:
        """Raise `OverloadedError` unless `more` permits are free for a request of `weight`."""
        if self.in_flight + more > self.limit:
            raise self._refusal(weight)
        if not self._shares.fits(owner, more, self.limit):
            raise self._refusal(weight, kept="; the free permits are kept for other API keys")

    def _count(self, owner: str, more: int) -> None:
        self.in_flight += more
        self._shares.add(owner, more)

    def _refusal(
        self, weight: int, taken: int | None = None, of: str = "", kept: str = ""
    ) -> OverloadedError:
        self._refused.add(weight, self._clock())
        more = "" if weight == 1 else f" and {weight} more are requested"
        taken = self.in_flight if taken is None else taken
        return OverloadedError(
            f"The server is busy: {taken} answers{of} run or wait{more}, and at most "
            f"{self.limit} may (--max-in-flight){kept}.",
            rejection="in_flight",
            retry_after_s=self.retry_after_s(),
        )


class Permit:
    """A permit for `weight` answers at once; `release` is idempotent."""

    __slots__ = ("_admission", "_is_flex", "owner", "weight")

    def __init__(self, admission: Admission, owner: str) -> None:
        self._admission = admission
        self._is_flex = False
        self.owner = owner
        self.weight = 1

    def grow(self, weight: int) -> None:
        """Set the number of answers. Raises `OverloadedError`."""
        if weight != self.weight:
            self.weight = self._admission.resize(self.owner, self.weight, weight)

    def move_to_flex(self) -> None:
        """Count the permit among those of the tier flex. Raises `OverloadedError`."""
        self._admission.move_to_flex(self)
        self._is_flex = True

    def release(self) -> None:
        if self._is_flex:
            self._admission.flex_in_flight -= self.weight
            self.weight = 0
        if self.weight:
            self._admission.free(self)
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
