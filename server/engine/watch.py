"""Watches over the engine: it must answer, and compute while it has requests.

The engine sends a message after every step, and answers between two steps when it is asked
something. So an engine that stays silent for longer than a step may take, asked half-way, hangs:
in a kernel, in a driver, or stopped from outside. One that answers and runs no step for that long,
although requests wait or run, has lost them: they would never end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

_LONGEST_LOOK_S = 1.0
_READS = 8


class HangWatch:
    """Counts the seconds of silence; used from the event loop only."""

    def __init__(
        self,
        timeout_s: float,
        messages: Callable[[], int],
        ask: Callable[[], Awaitable[object]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s` 0 never ends. `messages` counts what came; `ask` waits for an answer."""
        self._timeout_s = timeout_s
        self._messages = messages
        self._ask = ask
        self._clock = clock
        self._seen = -1
        self._looked_at = 0.0
        self._silent_s = 0.0
        self._question: asyncio.Task[None] | None = None

    def hung_for_s(self) -> float | None:
        """Return for how many seconds a hung engine is silent, None while it is not hung.

        To be called several times a second: of the time between two calls a second counts at
        most, because a process that was stopped itself has not listened.
        """
        if not self._timeout_s:
            return None
        now = self._clock()
        since, self._looked_at = now - self._looked_at, now
        if self._seen != (messages := self._messages()):
            self._seen, self._silent_s = messages, 0.0
            self._forget()
            return None
        self._silent_s += min(since, _LONGEST_LOOK_S)
        if self._silent_s >= self._timeout_s:
            return self._silent_s
        if self._silent_s >= self._timeout_s / 2 and self._question is None:
            self._question = asyncio.ensure_future(self._put())
        return None

    async def _put(self) -> None:
        # An engine that cannot be asked is dead, which is somebody else's to notice.
        with contextlib.suppress(Exception):
            await self._ask()

    def _forget(self) -> None:
        if self._question is not None:
            self._question.cancel()
            self._question = None


class IdleWatch:
    """Counts the seconds in which the engine has requests and computes nothing for them."""

    def __init__(
        self,
        timeout_s: float,
        unfinished: Callable[[], int],
        computed: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s` 0 never ends. `unfinished` counts the engine's requests.

        `computed` returns a number that grows with every step of a request, None if it is unknown.
        It reads files, so that it is called at most `_READS` times within `timeout_s`.
        """
        self._timeout_s = timeout_s
        self._unfinished, self._computed = unfinished, computed
        self._clock = clock
        self._seen: float | None = None
        self._looked_at = self._idle_s = self._since_read_s = 0.0

    def idle_for_s(self) -> float | None:
        """Return for how many seconds a stalled engine is idle, None while it is not stalled.

        To be called several times a second, as `HangWatch.hung_for_s`.
        """
        if not self._timeout_s:
            return None
        now = self._clock()
        since, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
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
