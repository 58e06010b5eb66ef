"""Notices that files changed, by looking at them: that works for mounts and swapped links too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from server.host.tasks import aside

_PERIOD_S = 1.0

_Looks = tuple[int, int, int]


class FileWatch:
    """Remembers what some files looked like when it was made; make it before reading them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = self._look()

    async def follow(
        self, changed: Callable[[], Awaitable[None]], period_s: float = _PERIOD_S
    ) -> None:
        """Await `changed` whenever one of the files is another than before; never returns."""
        while True:
            await asyncio.sleep(period_s)
            # A file system that hangs must not take the requests along.
            now = await aside(self._look)
            if now != self._seen:
                self._seen = now
                await changed()

    def _look(self) -> tuple[_Looks | None, ...]:
        return tuple(_looks(path) for path in self._paths)


def _looks(path: Path) -> _Looks | None:
    """Return what tells one version of a file from the next, None while there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
