"""The events of one response while it is made: kept in order, followed by any number of readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

END_EVENTS = tuple(f"event: response.{kind}\n" for kind in ("completed", "incomplete", "failed"))
"""What the frames begin with that have the response at its end."""


class EventLog:
    """Frames by their numbers, from 0. Used from the event loop."""

    def __init__(self) -> None:
        self.frames: list[str] = []
        self.stored = 0
        """How many of them are on the disk."""
        self._ended = False
        self._news = asyncio.Event()

    def add(self, frame: str) -> None:
        """Show one more."""
        self.frames.append(frame)
        self._wake()

    def end(self) -> None:
        """No more will come."""
        self._ended = True
        self._wake()

    async def follow(self, after: int) -> AsyncGenerator[str, None]:
        """Yield the frames behind the number `after`, as they come."""
        place = after + 1
        while True:
            news = self._news
            while place < len(self.frames):
                yield self.frames[place]
                place += 1
            if self._ended:
                return
            await news.wait()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
