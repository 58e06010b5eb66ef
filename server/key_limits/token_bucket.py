"""A token bucket: a rate per minute with a burst of one minute."""

from __future__ import annotations

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
        """Return the units at hand."""
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
