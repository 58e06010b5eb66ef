"""The run directory: created at start, removed at exit; abandoned ones are removed at start.

A server holds a lock on a file in its directory, which the kernel releases when the process ends.
Invariant: only directories of this user with an unlocked lock file are removed; no symbolic link is
followed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "rbln-serve-"
_LOCK = "lock"


@contextmanager
def run_folder(root: Path | None) -> Iterator[Path]:
    """Yield a new run directory in `root`, by default the system's, and remove it at the end."""
    top = Path(tempfile.gettempdir() if root is None else root)
    _remove_abandoned(top)
    folder, lock = _make(top)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(top: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=top))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Another server that starts now may have removed it as abandoned.
        if _try_lock(lock) and os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def _remove_abandoned(top: Path) -> None:
    for entry in os.scandir(top):
        if entry.name.startswith(_PREFIX) and _is_own_directory(entry):
            try:
                _remove_unless_held(Path(entry.path))
            except OSError as error:
                logger.debug("%s stays: %s", entry.path, error)


def _is_own_directory(entry: os.DirEntry[str]) -> bool:
    try:
        found = entry.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _remove_unless_held(folder: Path) -> None:
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
