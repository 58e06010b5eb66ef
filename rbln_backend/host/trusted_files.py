"""Files that only this user and root can have written, and that may be executed.

A SHA-256 beside a library says that the library is whole, not who wrote the two. So the file, its
folder and every folder above must belong to this user or to root and be closed to the writing of
others, except that root's sticky folders (/tmp) let others write beside it. What lies on a file
system that is mounted read-only is taken as it is: whoever mounted it has chosen it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rbln_backend.errors import UntrustedFileError

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
