"""Contents of a bundle: the paths of a cache root, so that an unpacked bundle is one.

`rbln/bundle.json` lists the rest; `rbln/graphs/<aa>/<digest>/` and `rbln/kernels/<key>/` are
entries as the stores keep them, less what only tells when and where they were made.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rbln_backend.errors import BundleError, CorruptArtifactError, UntrustedFileError
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
_LIST = "rbln/bundle.json"
_GRAPHS, _KERNELS = "graphs", "kernels"

Files = Mapping[str, bytes]


@dataclass
class Contents:
    """Graphs by key, and kernel libraries by the key of their build; all of them intact."""

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
        """Verify every byte against what the bundle says of it, and every graph by ``check``.

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
    """Read a bundle's contents from the stores; None stands for everything.

    Raises ``BundleError`` when something chosen is not there or is damaged, and for a library that
    another user could have written: a bundle's digest would vouch for it.
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


def _check_stored(key: CacheKey, content: Files, check: CheckGraph) -> None:
    try:
        check(key, content)
    except CorruptArtifactError as error:
        raise BundleError(
            f"graph {key.digest} is not exported: {error}; see `rbln-serve cache verify`"
        ) from None


def _sort(files: Files) -> tuple[dict[str, dict[str, bytes]], dict[str, dict[str, bytes]]]:
    """Graphs by digest and libraries by key, each the files of one folder."""
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
