"""Files of one artifact: manifest, verified reading and durable writing.

An entry is a directory with plain files and a `manifest.json` with the key's fields, each file's
size and SHA-256, and a checksum of the manifest. The manifest is canonical JSON, so that a change
of any byte is detected. Files may come from untrusted sources and are never executed here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rbln_backend.errors import ArtifactError, CorruptArtifactError
from rbln_backend.host.replaced_files import sync_directory
from rbln_backend.store.cache_key import CacheKey, canonical_json

MANIFEST = "manifest.json"
FORMAT = 1
PROGRAM = "program.json"
"""A captured graph as data."""
BINARIES = "binaries.bin"
"""A file with code, which only ``ArtifactStore.load_code`` returns."""

CheckGraph = Callable[[CacheKey, Mapping[str, bytes]], object]
"""Raises `CorruptArtifactError` for intact files that do not match their key."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and digest of one file, from the manifest."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A verified manifest; `created` is in Unix seconds."""

    key: CacheKey
    files: Mapping[str, FileRecord]
    created: float


def check_file_name(name: str) -> None:
    """Raise `ArtifactError` unless the name is plain: no path, not hidden, not the manifest."""
    if name == MANIFEST or not _FILE_NAME.fullmatch(name):
        raise ArtifactError(f"Invalid artifact file name {name!r}")


def write_entry(directory: Path, key: CacheKey, files: Mapping[str, bytes]) -> None:
    """Write an entry's files into an empty directory and fsync them; raises `OSError`."""
    for name, data in files.items():
        write_file(directory / name, data)
    write_file(directory / MANIFEST, encode_manifest(key, files, created=time.time()))
    sync_directory(directory)


def read_manifest(directory: Path) -> Manifest:
    """Read only an entry's manifest; raises like `read_entry`."""
    descriptor = _open_entry(directory)
    try:
        return decode_manifest(_read_file(descriptor, MANIFEST))
    finally:
        os.close(descriptor)


def read_entry(directory: Path, key: CacheKey) -> dict[str, bytes]:
    """Read an entry's files and verify each byte.

    Raises `FileNotFoundError` only if there is no entry, `CorruptArtifactError` if it is
    damaged or belongs to another key, and another `OSError` if it cannot be read.
    """
    descriptor = _open_entry(directory)
    try:
        manifest = decode_manifest(_read_file(descriptor, MANIFEST))
        if manifest.key != key:
            raise CorruptArtifactError(f"{MANIFEST} belongs to another key")
        return {
            name: _read_verified(descriptor, name, record)
            for name, record in manifest.files.items()
        }
    except CorruptArtifactError:
        if not _is_entry(descriptor, directory):
            # Evicted during the read; the name may now belong to another writer's intact entry.
            raise FileNotFoundError(f"{directory} was removed while it was read") from None
        raise
    finally:
        os.close(descriptor)


def _is_entry(descriptor: int, directory: Path) -> bool:
    """Return True if the opened directory is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), directory.stat())
    except OSError:
        return False


def encode_manifest(key: CacheKey, files: Mapping[str, bytes], *, created: float) -> bytes:
    """Return the manifest of an entry; `created` is in Unix seconds."""
    listing = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    }
    body: dict[str, Any] = {
        "format": FORMAT,
        "key": dict(key.fields),
        "files": listing,
        "created": created,
    }
    return canonical_json({**body, "checksum": _checksum(body)})


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(body)).hexdigest()


def decode_manifest(raw: bytes) -> Manifest:
    """Return the content of a manifest; raises `CorruptArtifactError` for any changed byte."""
    try:
        body = json.loads(raw)
        canonical = canonical_json(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptArtifactError(f"{MANIFEST} is not JSON: {error}") from None
    if not isinstance(body, dict) or canonical != raw:
        raise CorruptArtifactError(f"{MANIFEST} is not in canonical form")
    if body.pop("checksum", None) != _checksum(body):
        raise CorruptArtifactError(f"{MANIFEST} does not match its checksum")
    if body.get("format") != FORMAT:
        raise CorruptArtifactError(f"{MANIFEST} has format {body.get('format')}, not {FORMAT}")
    try:
        files = {name: _decode_record(name, record) for name, record in body["files"].items()}
        return Manifest(CacheKey(body["key"]), files, float(body["created"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptArtifactError(f"{MANIFEST} lacks or garbles a field: {error}") from None


def _decode_record(name: str, record: Mapping[str, Any]) -> FileRecord:
    # Names must not lead outside the directory.
    try:
        check_file_name(name)
    except ArtifactError as error:
        raise CorruptArtifactError(f"{MANIFEST}: {error}") from None
    return FileRecord(int(record["size"]), str(record["sha256"]))


def _open_entry(directory: Path) -> int:
    """Open the directory, so that all files are read from the same entry."""
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except NotADirectoryError:
        if directory.is_file():
            raise CorruptArtifactError(f"{directory.name} is not a directory") from None
        raise


def check_manifest_files(manifest: Manifest, files: Mapping[str, bytes]) -> None:
    """Raise `CorruptArtifactError` unless `files` match the manifest exactly."""
    if files.keys() != manifest.files.keys():
        raise CorruptArtifactError(f"its files are {sorted(files)}, not {sorted(manifest.files)}")
    for name, data in files.items():
        _check(name, data, manifest.files[name])


def _read_verified(directory: int, name: str, record: FileRecord) -> bytes:
    data = _read_file(directory, name)
    _check(name, data, record)
    return data


def _check(name: str, data: bytes, record: FileRecord) -> None:
    if len(data) != record.size:
        raise CorruptArtifactError(f"{name} has {len(data)} bytes, not {record.size}")
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise CorruptArtifactError(f"{name} does not match its SHA-256")


def _read_file(directory: int, name: str) -> bytes:
    # Non-blocking: a pipe in this place must not block the start-up.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(name, flags, dir_fd=directory)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CorruptArtifactError(f"{name} is not a regular file")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise CorruptArtifactError(f"{name} is missing") from None
    except OSError as error:
        # ENXIO is raised for a socket.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CorruptArtifactError(f"{name} is not a regular file") from None
        raise


def directory_bytes(path: Path) -> int:
    """Return the bytes of an entry's files, intact or not; 0 if unreadable."""
    try:
        return sum(item.stat(follow_symlinks=False).st_size for item in os.scandir(path))
    except OSError:
        return 0


def write_file(path: Path, data: bytes) -> None:
    """Write and fsync a new file; raises `OSError`."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
