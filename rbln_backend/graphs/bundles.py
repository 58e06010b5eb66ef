"""Bundles: reproducible tar files with entries of a store, which is a cache root when unpacked.

Written archives have sorted names, time 0, owner 0 and one mode. Equal content has an equal
SHA-256, so that registries and build caches see an unchanged layer. The reader accepts only regular
files with plain relative names, within bounds, and reads into memory.

`rbln/bundle.json` lists the other files. `rbln/graphs/<aa>/<digest>/` and `rbln/kernels/<key>/` are
entries as in the stores, without times and places of their creation. A bundle may be imported
while servers use the cache root. The audit searches a store for damaged and obsolete entries.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rbln_backend.errors import BundleError, CorruptArtifactError, UntrustedFileError
from rbln_backend.graphs.cache import (
    BINARIES,
    MANIFEST,
    ArtifactStore,
    CacheKey,
    CheckGraph,
    Entry,
    StoreEvent,
    check_manifest_files,
    decode_manifest,
    encode_manifest,
    entry_paths,
    graph_store,
    read_entry,
    read_manifest,
)
from rbln_backend.graphs.kernel_files import (
    KEY,
    LIBRARY,
    RECORD,
    are_intact,
    get_target,
    kernel_store,
    libraries,
    make_record,
    publish,
    read_trusted,
)

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
        folders = {parent.as_posix() for name in files for parent in Path(name).parents} - {"."}
        for name in sorted(folders):
            archive.addfile(_member(name, tarfile.DIRTYPE, _DIRECTORY_MODE, 0))
        for name in sorted(files):
            member = _member(name, tarfile.REGTYPE, _FILE_MODE, len(files[name]))
            archive.addfile(member, io.BytesIO(files[name]))
    return hashed.hexdigest()


def get_digest(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of the archive of ``files``."""
    with Path(os.devnull).open("wb") as nowhere:
        return write_archive(nowhere, files)


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
        while hashed.read(_PIECE):
            pass
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
            if not _NAME.fullmatch(name):
                raise BundleError(f"{name[:200]!r} is no name of a file in a bundle")
            room.take(path.stat().st_size)
            files[name] = path.read_bytes()
    return files, get_digest(files)


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
        if not _NAME.fullmatch(member.name):
            raise BundleError(f"{member.name[:200]!r} is no name of a file in a bundle")
        if member.name in files:
            raise BundleError(f"{member.name!r} is there twice")
        content = archive.extractfile(member)
        assert content is not None
        data = content.read()
        if len(data) != member.size:
            raise BundleError(f"{member.name!r} is cut short")
        files[member.name] = data
    return files


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

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


FORMAT = 1
_READABLE = 0o644
_LIST = "rbln/bundle.json"
_GRAPHS, _KERNELS = "graphs", "kernels"

Files = Mapping[str, bytes]


@dataclass
class Contents:
    """Intact graphs by key, and intact kernel libraries by the key of their build."""

    graphs: dict[CacheKey, Files] = field(default_factory=dict)
    kernels: dict[str, Files] = field(default_factory=dict)

    def to_files(self) -> dict[str, bytes]:
        """Return every file of the bundle by its path."""
        files = {_LIST: self._listing()}
        for key, content in self.graphs.items():
            folder = f"rbln/{_GRAPHS}/{key.digest[:2]}/{key.digest}"
            files[f"{folder}/{MANIFEST}"] = encode_manifest(key, content, created=0)
            files |= {f"{folder}/{name}": data for name, data in content.items()}
        for name, content in self.kernels.items():
            files |= {f"rbln/{_KERNELS}/{name}/{file}": data for file, data in content.items()}
        return files

    @classmethod
    def from_files(cls, files: Files, check: CheckGraph) -> Contents:
        """Verify every byte against the bundle's digests, and every graph by ``check``.

        Raises ``BundleError``.
        """
        graphs, kernels = _sort(files)
        found = cls()
        for digest, content in graphs.items():
            key, rest = _verified_graph(digest, content, check)
            found.graphs[key] = rest
        for name, content in kernels.items():
            if not are_intact(content):
                raise BundleError(f"the kernel library {name} does not match its record")
            found.kernels[name] = content
        if files.get(_LIST) != found._listing():
            raise BundleError(
                f"{_LIST} is missing, lists other things than there are, or is of another format "
                f"than {FORMAT}; the bundle is incomplete or was made by another version"
            )
        return found

    def _listing(self) -> bytes:
        listing = {
            "format": FORMAT,
            _GRAPHS: sorted(key.digest for key in self.graphs),
            _KERNELS: sorted(self.kernels),
        }
        return (json.dumps(listing, indent=1, sort_keys=True) + "\n").encode()


def collect(
    cache_root: Path,
    check: CheckGraph,
    *,
    digests: Collection[str] | None = None,
    kernel_keys: Collection[str] | None = None,
) -> Contents:
    """Read a bundle's contents from the stores; None selects everything.

    Raises ``BundleError`` for selected entries that are missing or damaged, and for a library that
    another user could have written, because the bundle's digest would make it trusted.
    """
    found = Contents()
    store = ArtifactStore(
        graph_store(cache_root), max_bytes=0, read_only=True, on_event=lambda _: None
    )
    for entry in store.entries():
        if digests is None or entry.key.digest in digests:
            content = store.load(entry.key)
            if content is None:
                raise BundleError(
                    f"graph {entry.key.digest} is damaged; see `rbln-serve cache verify`"
                )
            try:
                check(entry.key, content)
            except CorruptArtifactError as error:
                raise BundleError(
                    f"graph {entry.key.digest} is not exported: {error}; see "
                    "`rbln-serve cache verify`"
                ) from None
            found.graphs[entry.key] = content
    absent = set(digests or ()) - {key.digest for key in found.graphs}
    if absent:
        raise BundleError(f"graphs are not stored: {', '.join(sorted(absent))}")
    for library in libraries(kernel_store(cache_root)):
        if kernel_keys is not None and library.key not in kernel_keys:
            continue
        try:
            files = read_trusted(library.path)
        except UntrustedFileError as error:
            raise BundleError(
                f"the kernel library {library.key} is not exported: {error}; --no-kernels leaves "
                "kernels out"
            ) from None
        if files is not None:
            record = make_record(files[LIBRARY], get_target(files[RECORD]))
            found.kernels[library.key] = {LIBRARY: files[LIBRARY], RECORD: record}
    return found


def write_bundle(path: Path, contents: Contents) -> str:
    """Write a bundle atomically and return its SHA-256. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            digest = write_archive(file, contents.to_files())
            file.flush()
            os.fchmod(file.fileno(), _READABLE)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return digest


def write_folder(path: Path, contents: Contents) -> str:
    """Write into an empty or new folder; returns the SHA-256 that its bundle would have.

    Raises ``BundleError`` for a folder that is not empty, and ``OSError``.
    """
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise BundleError(f"{path} is not empty")
    files = contents.to_files()
    for name, data in files.items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return get_digest(files)


def _sort(files: Files) -> tuple[dict[str, dict[str, bytes]], dict[str, dict[str, bytes]]]:
    """Return the files of each folder: graphs by digest and libraries by key."""
    graphs: dict[str, dict[str, bytes]] = defaultdict(dict)
    kernels: dict[str, dict[str, bytes]] = defaultdict(dict)
    for path, data in files.items():
        match path.split("/"):
            case ["rbln", "bundle.json"]:
                continue
            case ["rbln", "graphs", start, digest, name] if digest[:2] == start:
                graphs[digest][name] = data
            case ["rbln", "kernels", key, name] if KEY.fullmatch(key):
                kernels[key][name] = data
            case _:
                raise BundleError(f"{path!r} belongs to no graph and no kernel library")
    return graphs, kernels


def _verified_graph(
    digest: str, content: dict[str, bytes], check: CheckGraph
) -> tuple[CacheKey, Files]:
    try:
        manifest = decode_manifest(content.pop(MANIFEST, b""))
        check_manifest_files(manifest, content)
        if manifest.key.digest != digest:
            raise CorruptArtifactError(f"{MANIFEST} belongs to another key")
        check(manifest.key, content)
    except CorruptArtifactError as error:
        raise BundleError(f"graph {digest}: {error}") from None
    return manifest.key, content


_REFUSED = ("failed", "read_only")


@dataclass(frozen=True, slots=True)
class Imported:
    """Counts of graphs and libraries that were added, present or skipped.

    A graph with an NPU's binaries counts as a graph, or as a skipped library without kernels.
    """

    graphs: int
    graphs_present: int
    kernels: int
    kernels_present: int
    kernels_left_out: int


def unpack(contents: Contents, cache_root: Path, *, max_bytes: int, with_kernels: bool) -> Imported:
    """Store the entries that a root lacks; intact entries remain.

    ``max_bytes`` bounds the graphs in the root, as for a server. Every entry of ``contents`` is
    verified already and appears by one rename. Raises ``BundleError`` for errors of the disk.
    """
    events: list[StoreEvent] = []
    store = ArtifactStore(graph_store(cache_root), max_bytes=max_bytes, on_event=events.append)
    graphs, code = dict(contents.graphs), 0
    if not with_kernels:
        graphs = {key: files for key, files in graphs.items() if BINARIES not in files}
        code = len(contents.graphs) - len(graphs)
    new = sum(_store(store, events, key, files) for key, files in graphs.items())
    published, folder = 0, kernel_store(cache_root)
    if with_kernels:
        try:
            published = sum(publish(folder / key, x) for key, x in contents.kernels.items())
        except OSError as error:
            raise BundleError(f"the kernels were not stored: {error}") from error
    return Imported(
        graphs=new,
        graphs_present=len(graphs) - new,
        kernels=published,
        kernels_present=len(contents.kernels) - published if with_kernels else 0,
        kernels_left_out=0 if with_kernels else len(contents.kernels) + code,
    )


def _store(store: ArtifactStore, events: list[StoreEvent], key: CacheKey, files: Files) -> bool:
    """Return True if the graph is new; reading a damaged one quarantines it."""
    with store.lock(key):
        if store.load(key) is not None:
            return False
        store.store(key, files)
    refused = next((event for event in events if event.kind in _REFUSED), None)
    if refused is not None:
        why = refused.detail or f"{store.root} cannot be written"
        raise BundleError(f"graph {refused.digest} was not stored: {why}")
    return True


_DAY_S = 86400.0


def audit(root: Path, check: CheckGraph) -> Iterator[tuple[str, str | None]]:
    """Verify every entry; yields its digest, and its damage or None."""
    for path in entry_paths(root):
        damage = None
        try:
            manifest = read_manifest(path)
            if manifest.key.digest != path.name:
                damage = "its manifest belongs to another key"
            else:
                check(manifest.key, read_entry(path, manifest.key))
        except CorruptArtifactError as error:
            damage = str(error)
        except OSError as error:
            damage = f"cannot be read: {error}"
        yield path.name, damage


def unused_since(entries: Sequence[Entry], days: float, now: float) -> list[Entry]:
    """Return the entries not stored or loaded for ``days``; ``now`` in Unix seconds."""
    return [entry for entry in entries if now - entry.last_used > days * _DAY_S]


def of_other_versions(entries: Sequence[Entry], fields: Mapping[str, object]) -> list[Entry]:
    """Return the entries whose keys differ from ``fields``, those of the versions in use."""
    return [
        entry
        for entry in entries
        if any(entry.key.fields.get(name) != value for name, value in fields.items())
    ]


def above_bound(entries: Sequence[Entry], max_bytes: int) -> list[Entry]:
    """Return the least recently used entries to remove for at most ``max_bytes``."""
    excess = sum(entry.size_bytes for entry in entries) - max_bytes
    gone = []
    for entry in sorted(entries, key=lambda entry: (entry.last_used, entry.key.digest)):
        if excess <= 0:
            break
        gone.append(entry)
        excess -= entry.size_bytes
    return gone
