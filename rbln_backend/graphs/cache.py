"""The graph cache: keys that identify artifacts, and `ArtifactStore`, which keeps them on disk.

A key is named JSON fields and their digest. The digest depends on the fields' names and values
only, never on insertion order, process or machine; a key cannot change once made
(tests/unit/test_bundle.py).

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
import math
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from rbln_backend.errors import ArtifactError, CorruptArtifactError
from rbln_backend.host.files import (
    acquire,
    check_trusted,
    claimed_folder,
    open_lock,
    remove_if_unlocked,
    sync_directory,
)

logger = logging.getLogger(__name__)

JsonValue: TypeAlias = (
    "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)
"""JSON values; of sequences, only strings, lists and tuples."""

DIGEST_CHARS = 32
"""Length of a digest: 128 bits of a SHA-256 in hexadecimal."""


class CacheKey:
    """Fields that identify an artifact; equal fields give equal keys.

    Tuples count as lists. Raises `TypeError` for a value that JSON cannot hold, naming where.
    """

    __slots__ = ("_digest", "_fields")

    def __init__(self, fields: Mapping[str, JsonValue]) -> None:
        canonical = canonical_json(fields)
        # Decoding the bytes makes a copy that callers cannot change.
        self._fields: Mapping[str, JsonValue] = MappingProxyType(json.loads(canonical))
        self._digest = hashlib.sha256(canonical).hexdigest()[:DIGEST_CHARS]

    @property
    def digest(self) -> str:
        """The first 32 hexadecimal characters of the SHA-256 of the canonical JSON."""
        return self._digest

    @property
    def fields(self) -> Mapping[str, JsonValue]:
        """The fields as JSON values, read-only."""
        return self._fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheKey) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"CacheKey({self._digest})"


def canonical_json(obj: JsonValue) -> bytes:
    """Return the canonical form of a JSON value: sorted keys, no spaces, ASCII, finite numbers.

    Raises `TypeError` for other values, with the path to them.
    """
    _check_json(obj, "$")
    # After the check only mappings other than dicts are left to convert.
    plain = json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dict)
    return plain.encode("ascii")


def diff(a: CacheKey, b: CacheKey) -> list[str]:
    """Return one line per field of b that differs from a's; empty when equal."""
    left, right = _flatten(a.fields, ""), _flatten(b.fields, "")
    lines = []
    for name in sorted({*left, *right}):
        if name not in left:
            lines.append(f"{name}: added, {right[name]}")
        elif name not in right:
            lines.append(f"{name}: removed, was {left[name]}")
        elif left[name] != right[name]:
            lines.append(f"{name}: {left[name]} -> {right[name]}")
    return lines


def _check_json(value: object, path: str) -> None:
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float):
        # NaN and the infinities have no JSON spelling and would break equality.
        if not math.isfinite(value):
            raise TypeError(f"{path} is {value!r}, which JSON cannot hold")
        return
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise TypeError(f"{path} has the key {name!r}, must be a string")
            _check_json(item, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{path}[{index}]")
    else:
        raise TypeError(f"{path} is a {type(value).__name__}, which JSON cannot hold")


def _flatten(value: JsonValue, path: str) -> dict[str, str]:
    """Map dotted paths to the JSON text of the leaves; lists without mappings are leaves."""
    leaves: dict[str, str] = {}
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            leaves |= _flatten(item, f"{path}.{name}" if path else name)
        return leaves
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            leaves |= _flatten(item, f"{path}[{index}]")
        return leaves
    return {path: canonical_json(value).decode()} if path else {}


_GRAPH_SOURCES = tuple(
    "collectives.py core.py devices layers lora models graphs/call_list.py graphs/capture.py "
    "graphs/operators.py graphs/program.py graphs/tensors.py worker/draft_model.py "
    "worker/graph_functions.py worker/inputs.py".split()
)


@cache
def sources_digest() -> str:
    """Return the SHA-256 of the sources, part of every graph's key against old programs."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for entry in _GRAPH_SOURCES:
        path = root / entry
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        for file in files:
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.relative_to(root).as_posix().encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


MANIFEST = "manifest.json"
FORMAT = 1
PROGRAM = "program.json"
"""A captured graph as data."""
BINARIES = "binaries.bin"
"""A file with code, which only ``ArtifactStore.load_code`` returns."""

CheckGraph = Callable[[CacheKey, Mapping[str, bytes]], object]
"""Raises `CorruptArtifactError` for intact files that do not match their key."""

QUARANTINE_KEPT = 8
"""Damaged entries kept for analysis; `prune` removes older ones."""

_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARS}}}")
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
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
        files = {name: _read_file(descriptor, name) for name in manifest.files}
        check_manifest_files(manifest, files)
        return files
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
        files = {}
        for name, record in body["files"].items():
            # Names must not lead outside the directory.
            check_file_name(name)
            files[name] = FileRecord(int(record["size"]), str(record["sha256"]))
        return Manifest(CacheKey(body["key"]), files, float(body["created"]))
    except ArtifactError as error:
        raise CorruptArtifactError(f"{MANIFEST}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptArtifactError(f"{MANIFEST} lacks or garbles a field: {error}") from None


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
        record = manifest.files[name]
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
        path = _path_in(self.root, digest)
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
                manifest = read_manifest(path)
                sizes = {name: record.size for name, record in manifest.files.items()}
                size, last_used = directory_bytes(path), _modified(path / MANIFEST)
                entry = Entry(manifest.key, path, sizes, size, manifest.created, last_used)
                found.append(entry)
        return sorted(found, key=lambda entry: (entry.last_used, entry.key.digest))

    def sizes(self) -> list[int]:
        """Return the bytes of each entry's files, damaged ones included."""
        return [directory_bytes(path) for path in entry_paths(self.root)]

    def prune(self) -> None:
        """Evict the least recently used entries above the bound, and remove garbage."""
        if self._read_only:
            return
        self._remove_garbage()
        sized = [(path, directory_bytes(path)) for path in entry_paths(self.root)]
        excess = sum(size for _, size in sized) - self._max_bytes
        if excess <= 0:
            return
        for path, size in sorted(sized, key=lambda pair: (_modified(pair[0] / MANIFEST), pair[0])):
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

    def _find(self, digest: str) -> Path:
        """Return the path of an entry: in the root if present, else in a bundle."""
        places = [_path_in(root, digest) for root in (self.root, *self._bundles)]
        return next((path for path in places if path.is_dir()), places[0])

    def _write(self, key: CacheKey, files: Mapping[str, bytes]) -> None:
        target = _path_in(self.root, key.digest)
        if target.is_dir():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        parent = self.root / "tmp"
        parent.mkdir(exist_ok=True)
        with claimed_folder(parent, "", "*", mode=0o777) as temporary:
            for name, data in files.items():
                write_file(temporary / name, data)
            manifest = encode_manifest(key, files, created=time.time())
            write_file(temporary / MANIFEST, manifest)
            sync_directory(temporary)
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


def _modified(path: Path) -> float:
    """Return when a file was written, a manifest also when it was last loaded; 0.0 without one."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
