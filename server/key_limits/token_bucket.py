"""Token buckets: a rate per minute with a burst of one minute."""

from __future__ import annotations

_MINUTE_S = 60.0


class TokenBucket:
    """Holds at most `limit` units and gains `limit` per minute, continuously.

    It may hold less than nothing: work whose size is known only at its end is charged then.
    Times are in seconds of one monotonic clock.
    """

    __slots__ = ("_state",)

    def __init__(self, limit: int, now: float) -> None:
        # Limit, units at hand, and when they were.
        self._state: list[float] | memoryview[float] = [float(limit), float(limit), now]

    @property
    def limit(self) -> int:
        """Units per minute, and the most that it holds."""
        return int(self._state[0])

    def level(self, now: float) -> float:
        """Return the units at hand."""
        limit, level, at = self._state
        return min(level + (now - at) * limit / _MINUTE_S, limit)

    def wait_s(self, units: float, now: float) -> float:
        """Return in how many seconds `units` are at hand, 0 if they are.

        More units than the limit are there once the bucket is full.
        """
        missing = min(units, self.limit) - self.level(now)
        return max(missing, 0.0) * _MINUTE_S / self.limit

    def take(self, units: float, now: float) -> None:
        """Remove `units`; negative ones are returned to the bucket."""
        self._set(self.limit, min(self.level(now) - units, self.limit), now)

    def resize(self, limit: int, now: float) -> None:
        """Change the limit; what was taken from the bucket stays taken."""
        self._set(limit, self.level(now) + limit - self.limit, now)

    def _set(self, limit: int, level: float, now: float) -> None:
        self._state[0], self._state[1], self._state[2] = float(limit), level, now


class SharedBucket(TokenBucket):
    """A bucket in three cells that several processes share; use it under their lock."""

    __slots__ = ()

    def __init__(self, cells: memoryview[float], limit: int, now: float) -> None:
        """Use the bucket in `cells`; cells of 0 become a full one."""
        self._state = cells
        if not cells[0]:
            self._set(limit, float(limit), now)
