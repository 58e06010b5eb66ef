"""Detects an engine that hangs, and one that has requests but runs no step.

The engine sends a message after every step and answers queries between two steps. An engine
without any message for `--step-timeout-s`, despite a query after half that time, hangs in a kernel
or a driver, or was stopped. An engine that answers but runs no step for that long although it has
requests has lost them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

_MAX_PERIOD_S = 1.0
_READS = 8


class HangWatch:
    """Counts the seconds without a message; used from the event loop only."""

    def __init__(
        self,
        timeout_s: float,
        messages: Callable[[], int],
        query: Callable[[], Awaitable[object]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`messages` returns the number received; `query` waits for an answer of the engine.

        `timeout_s` 0: never.
        """
        self._timeout_s = timeout_s
        self._messages = messages
        self._send_query = query
        self._clock = clock
        self._seen = -1
        self._checked_at = 0.0
        self._silent_s = 0.0
        self._query: asyncio.Task[None] | None = None

    def hung_for_s(self) -> float | None:
        """Return the silent seconds of a hung engine, None while it is not hung.

        Call it several times a second. At most one second counts between two calls, because this
        process may have been stopped itself.
        """
        if not self._timeout_s:
            return None
        now = self._clock()
        since, self._checked_at = now - self._checked_at, now
        if self._seen != (messages := self._messages()):
            self._seen, self._silent_s = messages, 0.0
            if self._query is not None:
                self._query.cancel()
                self._query = None
            return None
        self._silent_s += min(since, _MAX_PERIOD_S)
        if self._silent_s >= self._timeout_s:
            return self._silent_s
        if self._silent_s >= self._timeout_s / 2 and self._query is None:
            self._query = asyncio.ensure_future(self._run_query())
        return None

    async def _run_query(self) -> None:
        # The failure of a dead engine is reported by `VllmEngine.failure`.
        with contextlib.suppress(Exception):
            await self._send_query()


class IdleWatch:
    """Counts the seconds in which the engine has requests but runs no step."""

    def __init__(
        self,
        timeout_s: float,
        unfinished: Callable[[], int],
        computed: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`unfinished` returns the number of requests; `timeout_s` 0: never.

        `computed` returns a number that grows with every step, None if unknown. It reads files, so
        it is called at most `_READS` times within `timeout_s`.
        """
        self._timeout_s = timeout_s
        self._unfinished, self._computed = unfinished, computed
        self._clock = clock
        self._seen: float | None = None
        self._checked_at = self._idle_s = self._since_read_s = 0.0

    def idle_for_s(self) -> float | None:
        """Return the idle seconds of a stalled engine, None while it is not stalled.

        Call it several times a second, as `HangWatch.hung_for_s`.
        """
        if not self._timeout_s:
            return None
        now = self._clock()
        since, self._checked_at = min(now - self._checked_at, _MAX_PERIOD_S), now
        if not self._unfinished():
            self._idle_s = self._since_read_s = 0.0
            return None
        self._idle_s += since
        self._since_read_s += since
        if self._since_read_s < self._timeout_s / _READS:
            return None
        self._since_read_s = 0.0
        computed = self._computed()
        if computed is None or computed != self._seen:
            self._seen, self._idle_s = computed, 0.0
        return self._idle_s if self._idle_s >= self._timeout_s else None
