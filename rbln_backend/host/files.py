"""Files between processes: locks, files that are replaced whole, and files that may be run.

Locks are held by open descriptors and end with their process. Of a replaced file a reader, or a
crash, meets the old content or the new one.

Trusted files are those that only this user and root can have written. A SHA-256 beside a library
says that the library is whole, not who wrote the two. So the file, its folder and every folder
above must belong to this user or to root and be closed to the writing of others, except that
root's sticky folders (/tmp) let others write beside it. What lies on a file system that is mounted
read-only is taken as it is: whoever mounted it has chosen it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rbln_backend.errors import UntrustedFileError

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
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return path, descriptor
        except FileNotFoundError:
            # Another process has removed it.
            pass
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file beside ``path`` and give it that name; raises ``OSError`` and leaves nothing."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def sync_directory(path: Path) -> None:
    """Wait until the disk has the directory's names."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe in this place must not block.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FOLDER_MODE = 0o755


@contextmanager
def trusted_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of the folder ``path``; raises ``UntrustedFileError``, and ``OSError``.

    Links are followed before anything is judged, and none after that: the folders that are judged
    are those that are passed through.
    """
    _, *names = path.resolve(strict=True).parts
    place = Path("/")
    folder = os.open(place, _FOLDER)
    try:
        _check(folder, place)
        for name in names:
            inner = os.open(name, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder, place = inner, place / name
            _check(folder, place)
        yield folder
    finally:
        os.close(folder)


def open_trusted(folder: int, name: str) -> int:
    """A descriptor of the file ``name`` in a trusted folder; raises like ``trusted_folder``."""
    file = os.open(name, _FILE, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise UntrustedFileError(f"{name} is not a regular file")
        _check(file, Path(name))
    except BaseException:
        os.close(file)
        raise
    return file


def check_trusted(path: Path, names: Iterable[str]) -> None:
    """Raise like ``trusted_folder`` unless the files ``names`` in ``path`` may be run."""
    with trusted_folder(path) as folder:
        for name in names:
            os.close(open_trusted(folder, name))


def make_trusted_folder(path: Path) -> None:
    """Make ``path`` and what is missing above it; raises like ``trusted_folder``.

    Nothing is made below a folder that others may write. The umask may leave new folders open to
    the group (the image's does); these are not.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    with trusted_folder(missing[-1].parent if missing else path):
        for folder in reversed(missing):
            folder.mkdir(_FOLDER_MODE, exist_ok=True)
    with trusted_folder(path):
        pass


def _check(descriptor: int, path: Path) -> None:
    if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        return
    about = os.fstat(descriptor)
    if about.st_uid not in (0, os.geteuid()):
        raise UntrustedFileError(f"{path} belongs to another user ({about.st_uid})")
    is_shared = stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX and not about.st_uid
    if about.st_mode & _OF_OTHERS and not is_shared:
        mode = stat.S_IMODE(about.st_mode)
        raise UntrustedFileError(f"others may write {path} (mode {mode:04o})")
