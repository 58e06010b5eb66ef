"""`ArtifactStore`: compiled graphs on disk, shared by processes and verified by every load.

An entry is a directory with plain files and a `manifest.json` with the key's fields, each file's
size and SHA-256, and a checksum of the manifest. The manifest is canonical JSON, so that a change
of any byte is detected. Files may come from untrusted sources and are never executed here.

Layout under the root: `<digest[:2]>/<digest>/` holds an entry's files and its `manifest.json`;
`tmp/` entries being written or removed; `locks/` one file per digest; `quarantine/` damaged
entries. Invariants (tests/unit/test_artifacts.py):

- An entry appears complete, by one rename of a directory whose files were fsynced, or not at all.
- `load` returns exactly the stored bytes, or None: any changed byte is detected.
- Neither a full or read-only disk nor a killed writer raises, or blocks another process.
- The writer of a directory in `tmp/` holds a lock on it; a directory without a lock is garbage.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rbln_backend.errors import ArtifactError, CorruptArtifactError
from rbln_backend.graphs.cache_key import DIGEST_CHARS, CacheKey, canonical_json
from rbln_backend.host.files import (
    acquire,
    check_trusted,
    claimed_folder,
    open_lock,
    remove_if_unlocked,
    sync_directory,
)

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


logger = logging.getLogger(__name__)

QUARANTINE_KEPT = 8
"""Damaged entries kept for analysis; `prune` removes older ones."""

_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARS}}}")
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


def graph_store(cache_root: Path) -> Path:
    """Return the folder of the graphs under a cache root."""
    return cache_root / "rbln" / "graphs"


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """An event of an entry.

    `kind` is hit, miss or corrupt for a load; stored, failed or read_only for a store; lock_wait
    or evicted. `seconds` is the duration of the load, store or wait, `num_bytes` the entry's size.
    """

    kind: str
    digest: str
    seconds: float = 0.0
    num_bytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored artifact, described by its manifest; times are Unix seconds."""

    key: CacheKey
    path: Path
    files: Mapping[str, int]
    size_bytes: int
    created: float
    last_used: float


class ArtifactStore:
    """Entries by `CacheKey`, bounded by `max_bytes`. Safe between processes and threads.

    No method raises because of the state of the disk: `on_event` gets the event, and the caller
    compiles as if the store were empty.
    """

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int,
        read_only: bool = False,
        bundles: Sequence[Path] = (),
        on_event: Callable[[StoreEvent], None],
    ) -> None:
        """``bundles`` are roots of other stores, searched for missing entries and never changed.

        A root that is not writable is treated as read-only.
        """
        self.root = root
        self._bundles = tuple(bundles)
        self._max_bytes = max_bytes
        self._read_only = read_only or not is_writable(root)
        self._on_event = on_event
        if not self._read_only:
            self._remove_garbage()

    def load(self, key: CacheKey) -> dict[str, bytes] | None:
        """Return the verified files of an entry, or None: absent, unreadable or damaged.

        A damaged entry moves to the quarantine, unless the store is read-only.
        """
        return self._load_from(self._find(key.digest), key, self.load)

    def _load_from(
        self, path: Path, key: CacheKey, load_again: Callable[[CacheKey], dict[str, bytes] | None]
    ) -> dict[str, bytes] | None:
        started = time.monotonic()
        try:
            files = read_entry(path, key)
        except CorruptArtifactError as error:
            self._report_damage(path, error)
            # A bundle may have an intact copy.
            return None if path.is_dir() or not self.has(key) else load_again(key)
        except OSError as error:
            absent = isinstance(error, FileNotFoundError)
            if not absent:
                logger.warning("Artifact %s is unreadable: %s", key.digest, error)
            self._on_event(StoreEvent("miss", key.digest, detail="" if absent else str(error)))
            return None
        if not self._read_only:
            with contextlib.suppress(OSError):
                os.utime(path / MANIFEST)
        seconds = time.monotonic() - started
        num_bytes = sum(map(len, files.values()))
        self._on_event(StoreEvent("hit", key.digest, seconds, num_bytes))
        return files

    def load_code(self, key: CacheKey) -> dict[str, bytes] | None:
        """Load like ``load``; warn and return None if another user could have written the entry."""
        path = self._find(key.digest)
        try:
            check_trusted(path, (BINARIES, MANIFEST))
        except FileNotFoundError as error:
            if path.is_dir():
                self._report_damage(path, CorruptArtifactError(f"a file is missing: {error}"))
            else:
                self._on_event(StoreEvent("miss", key.digest))
            return None
        except OSError as error:
            logger.warning("Artifact %s is code and is not taken: %s", key.digest, error)
            return None
        # Load the checked copy; a copy in a bundle is checked separately.
        return self._load_from(path, key, self.load_code)

    def store(self, key: CacheKey, files: Mapping[str, bytes]) -> None:
        """Write an entry unless the key has one, then evict entries above the bound.

        Raises `ArtifactError` for a file name that is not plain; disk errors are only reported.
        """
        for name in files:
            check_file_name(name)
        num_bytes = sum(map(len, files.values()))
        if self._read_only:
            self._on_event(StoreEvent("read_only", key.digest, num_bytes=num_bytes))
            return
        if num_bytes > self._max_bytes:
            detail = f"{num_bytes} bytes exceed the bound of {self._max_bytes}"
            self._on_event(StoreEvent("failed", key.digest, num_bytes=num_bytes, detail=detail))
            return
        started = time.monotonic()
        try:
            self._write(key, files)
        except OSError as error:
            kind = "read_only" if error.errno in _NOT_WRITABLE else "failed"
            logger.warning("Artifact %s was not stored: %s", key.digest, error)
            self._on_event(StoreEvent(kind, key.digest, num_bytes=num_bytes, detail=str(error)))
            return
        seconds = time.monotonic() - started
        self._on_event(StoreEvent("stored", key.digest, seconds, num_bytes))
        self.prune()

    def has(self, key: CacheKey) -> bool:
        """Return whether there is an entry; only `load` verifies it."""
        return self._find(key.digest).is_dir()

    def quarantine(self, digest: str, reason: str) -> None:
        """Move away an entry that the caller cannot use.

        A bundle's entry is only reported.
        """
        logger.warning("Artifact %s is unusable: %s", digest, reason)
        if self._move_to_quarantine(self._find(digest)):
            self._on_event(StoreEvent("corrupt", digest, detail=reason))

    def evict(self, digest: str) -> bool:
        """Remove an entry; False if it is not there or cannot be removed."""
        path = self._entry_path(digest)
        size = directory_bytes(path)
        if self._read_only or not self._discard(path):
            return False
        self._on_event(StoreEvent("evicted", digest, num_bytes=size))
        return True

    @contextlib.contextmanager
    def lock(self, key: CacheKey) -> Iterator[float]:
        """Lock the key between processes, so that one compiles while the others wait.

        Yields the seconds waited. If no lock file can be created (read-only, full disk) it yields
        0.0 at once, and two processes may do the same work.
        """
        descriptor = None if self._read_only else open_lock(self.root / "locks" / key.digest)
        if descriptor is None:
            yield 0.0
            return
        try:
            waited = acquire(descriptor, key.digest)
            self._on_event(StoreEvent("lock_wait", key.digest, waited))
            yield waited
        finally:
            os.close(descriptor)

    def entries(self) -> list[Entry]:
        """Return the entries with an intact manifest, least recently used first.

        Other files are not read; only `load` verifies them.
        """
        found = []
        for path in entry_paths(self.root):
            with contextlib.suppress(OSError, CorruptArtifactError):
                found.append(_describe(path))
        return sorted(found, key=lambda entry: (entry.last_used, entry.key.digest))

    def size_bytes(self) -> int:
        """Return the bytes of all entries' files, damaged ones included."""
        return sum(map(directory_bytes, entry_paths(self.root)))

    def prune(self) -> None:
        """Evict the least recently used entries above the bound, and remove garbage."""
        if self._read_only:
            return
        self._remove_garbage()
        sized = [(path, directory_bytes(path)) for path in entry_paths(self.root)]
        excess = sum(size for _, size in sized) - self._max_bytes
        if excess <= 0:
            return
        for path, size in sorted(sized, key=lambda pair: (_last_used(pair[0]), pair[0])):
            if excess <= 0:
                break
            if self._discard(path):
                self._on_event(StoreEvent("evicted", path.name, num_bytes=size))
            elif path.exists():
                continue
            # Evicted here or by another process.
            excess -= size

    def _report_damage(self, path: Path, error: CorruptArtifactError) -> None:
        if self._move_to_quarantine(path):
            logger.warning("Artifact %s is damaged: %s", path.name, error)
            self._on_event(StoreEvent("corrupt", path.name, detail=str(error)))
        else:
            detail = "removed by another process while it was read"
            self._on_event(StoreEvent("miss", path.name, detail=detail))

    def _entry_path(self, digest: str) -> Path:
        return _path_in(self.root, digest)

    def _find(self, digest: str) -> Path:
        """Return the path of an entry: in the root if present, else in a bundle."""
        places = [_path_in(root, digest) for root in (self.root, *self._bundles)]
        return next((path for path in places if path.is_dir()), places[0])

    def _write(self, key: CacheKey, files: Mapping[str, bytes]) -> None:
        target = self._entry_path(key.digest)
        if target.is_dir():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        parent = self.root / "tmp"
        parent.mkdir(exist_ok=True)
        with claimed_folder(parent, "", "*", mode=0o777) as temporary:
            write_entry(temporary, key, files)
            try:
                temporary.rename(target)
            except OSError as error:
                # Another process stored the same key first.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        sync_directory(target.parent)
        sync_directory(self.root)

    def _remove_garbage(self) -> None:
        with contextlib.suppress(OSError):
            for path in list((self.root / "tmp").iterdir()):
                remove_if_unlocked(path)
        with contextlib.suppress(OSError):
            damaged = sorted((self.root / "quarantine").iterdir(), key=_modified, reverse=True)
            for path in damaged[QUARANTINE_KEPT:]:
                shutil.rmtree(path, ignore_errors=True)

    def _move_to_quarantine(self, path: Path) -> bool:
        """Move a damaged entry; False if another process has moved it."""
        if self._read_only or not path.is_relative_to(self.root):
            return True
        quarantine = self.root / "quarantine"
        try:
            quarantine.mkdir(exist_ok=True)
            target = quarantine / f"{path.name}-{uuid.uuid4().hex[:8]}"
            path.rename(target)
            os.utime(target)
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("Cannot quarantine %s: %s", path, error)
        return True

    def _discard(self, path: Path) -> bool:
        """Remove an entry by a rename out of the readers' view; False if that fails."""
        garbage = self.root / "tmp" / uuid.uuid4().hex
        try:
            garbage.parent.mkdir(exist_ok=True)
            path.rename(garbage)
        except OSError:
            return False
        shutil.rmtree(garbage, ignore_errors=True)
        return True


def is_writable(root: Path) -> bool:
    """Return whether files, or ``root`` itself, can be created.

    True for a path that is not a directory: its use fails with a specific error.
    """
    there = next(path for path in (root, *root.parents) if path.exists())
    return not there.is_dir() or os.access(there, os.W_OK | os.X_OK)


def _path_in(root: Path, digest: str) -> Path:
    return root / digest[:2] / digest


def entry_paths(root: Path) -> list[Path]:
    """Return the paths of all entries of a store, intact or not."""
    try:
        found = root.glob("[0-9a-f][0-9a-f]/*")
        return sorted(path for path in found if _DIGEST.fullmatch(path.name))
    except OSError:
        return []


def _describe(path: Path) -> Entry:
    manifest = read_manifest(path)
    return Entry(
        key=manifest.key,
        path=path,
        files={name: record.size for name, record in manifest.files.items()},
        size_bytes=directory_bytes(path),
        created=manifest.created,
        last_used=_last_used(path),
    )


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _last_used(path: Path) -> float:
    """Return the time of the last store or load; 0.0 without a manifest."""
    return _modified(path / MANIFEST)
