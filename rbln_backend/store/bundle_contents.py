"""Contents of a bundle, with the paths of a cache root: an unpacked bundle is a cache root.

`rbln/bundle.json` lists the other files. `rbln/graphs/<aa>/<digest>/` and `rbln/kernels/<key>/` are
entries as in the stores, without times and places of their creation.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rbln_backend.errors import BundleError, CorruptArtifactError, UntrustedFileError
from rbln_backend.store.archive import digest_of, write_archive
from rbln_backend.store.artifact_files import (
    MANIFEST,
    CheckGraph,
    check_manifest_files,
    decode_manifest,
    encode_manifest,
)
from rbln_backend.store.artifacts import ArtifactStore, graph_store
from rbln_backend.store.cache_key import CacheKey
from rbln_backend.store.kernel_files import (
    KEY,
    LIBRARY,
    RECORD,
    are_intact,
    kernel_store,
    libraries,
    make_record,
    read_trusted,
    target_of,
)

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
            _check_stored(entry.key, content, check)
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
            record = make_record(files[LIBRARY], target_of(files[RECORD]))
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
    return digest_of(files)


def _check_stored(key: CacheKey, content: Files, check: CheckGraph) -> None:
    try:
        check(key, content)
    except CorruptArtifactError as error:
        raise BundleError(
            f"graph {key.digest} is not exported: {error}; see `rbln-serve cache verify`"
        ) from None


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
