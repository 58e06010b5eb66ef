"""Import of a bundle into a cache root, while servers may use it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rbln_backend.errors import BundleError
from rbln_backend.store.artifact_files import BINARIES
from rbln_backend.store.artifacts import ArtifactStore, StoreEvent, graph_store
from rbln_backend.store.bundle_contents import Contents, Files
from rbln_backend.store.cache_key import CacheKey
from rbln_backend.store.kernel_files import kernel_store, publish

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
    published = 0
    if with_kernels:
        published = _publish(cache_root, contents)
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


def _publish(cache_root: Path, contents: Contents) -> int:
    folder = kernel_store(cache_root)
    try:
        return sum(publish(folder / key, files) for key, files in contents.kernels.items())
    except OSError as error:
        raise BundleError(f"the kernels were not stored: {error}") from error
