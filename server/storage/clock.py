"""Clock for deletions and expiries.

A deletion cannot be undone, so a wrong jump of the system clock must not expire data. This clock
follows elapsed time: it adopts a forward jump of the system clock after an hour, a backward jump
at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_SLACK_S = 60.0
"""Largest difference that is an ordinary clock correction."""
_GRACE_S = 3600.0


def _elapsed_s() -> float:
    # Unlike CLOCK_MONOTONIC it counts the time in which the host sleeps.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ExpiryClock:
    """Seconds since 1970. Any thread may use it; a lost update of the offset is harmless."""

    def __init__(
        self, system: Callable[[], float] = time.time, elapsed: Callable[[], float] = _elapsed_s
    ) -> None:
        """`system` may jump, `elapsed` never does."""
        self._system, self._elapsed = system, elapsed
        self._offset = system() - elapsed()
        self._ahead_since: float | None = None

    def now(self) -> int:
        """Return the time."""
        system, elapsed = self._system(), self._elapsed()
        jump = system - elapsed - self._offset
        if jump > _SLACK_S:
            if self._ahead_since is None:
                self._ahead_since = elapsed
                logger.warning(
                    "The system clock has jumped %.0f s forward; nothing expires by it for %.0f s.",
                    *(jump, _GRACE_S),
                )
            if elapsed - self._ahead_since < _GRACE_S:
                return int(elapsed + self._offset)
        self._offset, self._ahead_since = system - elapsed, None
        return int(system)
