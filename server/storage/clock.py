"""The clock that deletions and expiries go by.

A system clock that jumps forward, as by a wrong time server, would expire what has days to live,
and a deletion cannot be taken back. So this clock runs with the time that really passes. It
follows a jump of the system clock forward after an hour, and backward at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_SLACK_S = 60.0
"""A difference that is no jump: clocks are corrected little by little."""
_GRACE_S = 3600.0


def _passed_s() -> float:
    # Unlike CLOCK_MONOTONIC it counts the time in which the host sleeps.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ExpiryClock:
    """Seconds since 1970; used from any thread, where a lost update costs nothing."""

    def __init__(
        self, system: Callable[[], float] = time.time, passed: Callable[[], float] = _passed_s
    ) -> None:
        """`system` may jump, `passed` never does."""
        self._system, self._passed = system, passed
        self._offset = system() - passed()
        self._ahead_since: float | None = None

    def now(self) -> int:
        """Return the time."""
        system, passed = self._system(), self._passed()
        jump = system - passed - self._offset
        if jump <= _SLACK_S:
            self._offset, self._ahead_since = system - passed, None
            return int(system)
        if self._ahead_since is None:
            self._ahead_since = passed
            logger.warning(
                "The system clock has jumped %.0f s forward; nothing expires by it for %.0f s.",
                *(jump, _GRACE_S),
            )
        if passed - self._ahead_since >= _GRACE_S:
            self._offset, self._ahead_since = system - passed, None
            return int(system)
        return int(passed + self._offset)
