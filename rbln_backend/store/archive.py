"""Reproducible tar files, and a reader for untrusted ones.

Written archives have sorted names, time 0, owner 0 and one mode. Equal content has an equal
SHA-256, so that registries and build caches see an unchanged layer. The reader accepts only regular
files with plain relative names, within bounds, and reads into memory.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from rbln_backend.errors import BundleError

MAX_FILES = 20_000
MAX_BYTES = 1 << 30
"""Limit of a bundle's total size; a graph has about 200 KB, a kernel library 1 MB."""

_FILE_MODE, _DIRECTORY_MODE = 0o644, 0o755
_NAME = re.compile(r"rbln(/[A-Za-z0-9][A-Za-z0-9._-]{0,127}){1,4}")
_PIECE = 1 << 20
_OVERHEAD = MAX_FILES * 1024 + _PIECE


def write_archive(target: IO[bytes], files: Mapping[str, bytes]) -> str:
    """Write ``files`` by name to ``target`` and return the hexadecimal SHA-256 of the archive."""
    hashed = _Hashed(target)
    with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(_directories(files)):
            archive.addfile(_member(name, tarfile.DIRTYPE, _DIRECTORY_MODE, 0))
        for name in sorted(files):
            member = _member(name, tarfile.REGTYPE, _FILE_MODE, len(files[name]))
            archive.addfile(member, io.BytesIO(files[name]))
    return hashed.hexdigest()


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of the archive of ``files``."""
    return write_archive(_Nowhere(), files)


def read_archive(path: Path, *, max_bytes: int = MAX_BYTES) -> tuple[dict[str, bytes], str]:
    """Return the files of an archive by name, and the archive's SHA-256.

    Raises ``BundleError`` for an invalid archive, and ``OSError``.
    """
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        # A device or a pipe may be endless.
        if not stat.S_ISREG(about.st_mode):
            raise BundleError(f"{path} is not a regular file")
        # Bounds the memory, headers included.
        if about.st_size > max_bytes + _OVERHEAD:
            raise BundleError(f"{path} is larger than {max_bytes} bytes, the limit (--max-bytes)")
        hashed = _Hashed(file)
        try:
            with tarfile.open(fileobj=hashed, mode="r|") as archive:
                files = _read_members(archive, max_bytes)
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise BundleError(f"{path} is no bundle, or is cut short: {error}") from None
        # The digest covers the whole file, with any data after the archive's end.
        hashed.drain()
    return files, hashed.hexdigest()


def read_tree(root: Path, *, max_bytes: int = MAX_BYTES) -> tuple[dict[str, bytes], str]:
    """Read like ``read_archive`` from the folder of an unpacked bundle."""
    files: dict[str, bytes] = {}
    room = _Room(max_bytes)
    for path in sorted((root / "rbln").rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise BundleError(f"{path} is neither a file nor a folder")
        if path.is_file():
            name = path.relative_to(root).as_posix()
            _check_name(name)
            room.take(path.stat().st_size)
            files[name] = path.read_bytes()
    return files, digest_of(files)


def _read_members(archive: tarfile.TarFile, max_bytes: int) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    room = _Room(max_bytes)
    for member in archive:
        room.take(member.size)
        if member.isdir():
            continue
        # Links, devices and sparse files are rejected.
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise BundleError(f"{member.name!r} is not a regular file")
        _check_name(member.name)
        if member.name in files:
            raise BundleError(f"{member.name!r} is there twice")
        content = archive.extractfile(member)
        assert content is not None
        data = content.read()
        if len(data) != member.size:
            raise BundleError(f"{member.name!r} is cut short")
        files[member.name] = data
    return files


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BundleError(f"{name[:200]!r} is no name of a file in a bundle")


class _Room:
    """Remaining files and bytes of a reader."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._files = self._bytes = 0

    def take(self, size: int) -> None:
        self._files += 1
        self._bytes += size
        if self._files > MAX_FILES:
            raise BundleError(f"it has more than {MAX_FILES} files")
        if self._bytes > self._max_bytes:
            raise BundleError(
                f"it holds more than {self._max_bytes} bytes, the limit (--max-bytes)"
            )


def _directories(files: Mapping[str, bytes]) -> set[str]:
    parents = (parent for name in files for parent in Path(name).parents)
    return {parent.as_posix() for parent in parents} - {"."}


def _member(name: str, kind: bytes, mode: int, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.size = kind, mode, size
    # All other fields stay 0 or empty, so that machines write equal archives.
    return member


class _Hashed(io.RawIOBase):
    """File wrapper that hashes the bytes that pass."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._sha256.update(data)
        return data

    def write(self, data: bytes) -> int:  # type: ignore[override]  # bytes are what tarfile gives
        self._sha256.update(data)
        self._file.write(data)
        return len(data)

    def drain(self) -> None:
        """Hash the rest of the file."""
        while self.read(_PIECE):
            pass

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


class _Nowhere(io.BytesIO):
    """File that discards its bytes."""

    def write(self, data: object) -> int:
        assert isinstance(data, bytes)
        return len(data)
