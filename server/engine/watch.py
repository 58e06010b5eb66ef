"""Whether the engine still moves.

The engine sends a message after every step, and answers between two steps when it is asked
something. So an engine that stays silent for longer than a step may take, asked half-way, hangs:
in a kernel, in a driver, or stopped from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

_LONGEST_LOOK_S = 1.0


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
