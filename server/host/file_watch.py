"""Detects changed files by polling, which also works for mounts and replaced symbolic links."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from server.host.tasks import in_thread

_PERIOD_S = 1.0

_Version = tuple[int, int, int]


class FileWatch:
    """Compares files with their versions at construction; construct it before reading them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = self._versions()

    async def follow(
        self, changed: Callable[[], Awaitable[None]], period_s: float = _PERIOD_S
    ) -> None:
        """Await `changed` whenever one of the files has changed; never returns."""
        while True:
            await asyncio.sleep(period_s)
            # A file system that hangs must not block the event loop.
            now = await in_thread(self._versions)
            if now != self._seen:
                self._seen = now
                await changed()

    def _versions(self) -> tuple[_Version | None, ...]:
        return tuple(_version(path) for path in self._paths)


def _version(path: Path) -> _Version | None:
    """Return inode, size and modification time of a file, None if it does not exist."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
