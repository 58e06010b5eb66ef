"""Files of the machine: changed ones, those at untrusted paths, and the run directory."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from server.host.tasks import in_thread

_PERIOD_S = 1.0


class FileWatch:
    """Compares files with their versions at construction; construct it before reading them.

    By polling, which also works for mounts and replaced symbolic links.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = self._versions()

    async def follow(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Await `changed` whenever one of the files has changed; never returns."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            # A file system that hangs must not block the event loop.
            now = await in_thread(self._versions)
            if now != self._seen:
                self._seen = now
                await changed()

    def _versions(self) -> list[tuple[int, int, int] | None]:
        """Return inode, size and modification time of each file, None if it does not exist."""
        versions: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                stat = path.stat()
                versions.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
            except OSError:
                versions.append(None)
        return versions


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file at an untrusted path.

    Raises `OSError` for pipes and devices, and for more than `max_bytes`.
    """
    # O_NONBLOCK: opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise OSError(f"it is larger than {max_bytes} bytes")
    return content


logger = logging.getLogger(__name__)


_PREFIX = "rbln-serve-"
_LOCK = "lock"


@contextmanager
def run_folder(root: Path | None) -> Iterator[Path]:
    """Yield a new run directory in `root`, by default the system's, and remove it at the end.

    Abandoned ones are removed first. A server holds a lock on a file in its directory, which the
    kernel releases when the process ends. Invariant: only directories of this user with an unlocked
    lock file are removed; no symbolic link is followed.
    """
    top = Path(tempfile.gettempdir() if root is None else root)
    for entry in os.scandir(top):
        if entry.name.startswith(_PREFIX):
            try:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                    _remove_unless_locked(Path(entry.path))
            except OSError as error:
                logger.debug("%s stays: %s", entry.path, error)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=top))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Another server that starts now may have removed it as abandoned.
        if _try_lock(lock) and os.fstat(lock).st_nlink:
            break
        os.close(lock)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_unless_locked(folder: Path) -> None:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(os.fstat(lock).st_mode) and _try_lock(lock):
            shutil.rmtree(folder)
            logger.info("removed the run directory %s of a killed server", folder)
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
