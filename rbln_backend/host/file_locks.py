"""Advisory file locks, held by open descriptors and released with their process."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)


def open_lock(path: Path) -> int | None:
    """Open a lock file, created if missing; None if it cannot be created."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError:
            # It belongs to another user; reading suffices for a lock.
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        logger.warning("Compiling without a lock: %s", error)
        return None


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``, which is created; raises ``OSError``."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def acquire(descriptor: int, digest: str) -> float:
    """Wait for the lock and return the seconds waited."""
    started = time.monotonic()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("Waiting for another process that compiles %s", digest)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        logger.warning("Compiling without a lock: %s", error)
    return time.monotonic() - started


def _lock_in_place(path: Path, descriptor: int) -> bool:
    """Lock a new directory; False if another process has removed it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
    except OSError:
        os.close(descriptor)
        raise


def remove_if_unlocked(path: Path) -> None:
    """Remove a directory unless its writer holds a lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        # Its writer is running.
        return
    finally:
        os.close(descriptor)


@contextmanager
def claimed_folder(
    parent: Path, prefix: str, leftovers: str, *, mode: int = 0o700
) -> Iterator[Path]:
    """Yield a new, locked folder in ``parent``, removed at the end unless it was renamed.

    Folders of killed processes, which match the pattern ``leftovers``, are removed first. The umask
    applies to ``mode``. Raises ``OSError``.
    """
    for path in parent.glob(leftovers):
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                remove_if_unlocked(path)
    path, descriptor = _claim(parent, prefix, mode)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _claim(parent: Path, prefix: str, mode: int) -> tuple[Path, int]:
    while True:
        path = parent / f"{prefix}{uuid.uuid4().hex}"
        path.mkdir(mode)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        if _lock_in_place(path, descriptor):
            return path, descriptor
        os.close(descriptor)
