"""Event log of a response in progress, for any number of concurrent readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

END_EVENTS = tuple(f"event: response.{kind}\n" for kind in ("completed", "incomplete", "failed"))
"""First lines of the frames that contain the final response."""


class EventLog:
    """Frames numbered from 0. Used from the event loop."""

    def __init__(self) -> None:
        self.frames: list[str] = []
        self.stored = 0
        """Number of frames on the disk."""
        self._ended = False
        self._changed = asyncio.Event()

    def add(self, frame: str) -> None:
        """Append a frame."""
        self.frames.append(frame)
        self._wake()

    def end(self) -> None:
        """Close the log."""
        self._ended = True
        self._wake()

    async def follow(self, after: int) -> AsyncGenerator[str, None]:
        """Yield the frames after the number `after`, as they arrive."""
        number = after + 1
        while True:
            changed = self._changed
            while number < len(self.frames):
                yield self.frames[number]
                number += 1
            if self._ended:
                return
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
