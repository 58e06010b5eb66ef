"""The artifact store of a rank, with its events as metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rbln_backend.config import RblnConfig
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.store.artifacts import ArtifactStore, StoreEvent, graph_store

_REQUESTS = frozenset(("hit", "miss", "corrupt"))
_WRITES = frozenset(("stored", "failed", "read_only"))


def store_event_recorder(board: MetricsBoard) -> Callable[[StoreEvent], None]:
    """Return a listener for ``ArtifactStore``, whose label sets exist from the start, at 0."""
    requests = {
        kind: board.counter("rbln_compile_cache_requests_total", result=kind) for kind in _REQUESTS
    }
    writes = {
        kind: board.counter("rbln_compile_cache_writes_total", result=kind) for kind in _WRITES
    }
    lock_wait = board.histogram("rbln_compile_cache_lock_wait_seconds")

    def record(event: StoreEvent) -> None:
        if event.kind in requests:
            requests[event.kind].inc()
        elif event.kind in writes:
            writes[event.kind].inc()
        elif event.kind == "lock_wait":
            lock_wait.observe(event.seconds)

    return record


def report_store_size(board: MetricsBoard, store: ArtifactStore) -> None:
    """Set the metrics of entries and bytes. Called after the warm-up."""
    board.gauge("rbln_compile_cache_entries").set(len(store.entries()))
    board.gauge("rbln_compile_cache_size_bytes").set(store.size_bytes())


def open_store(rbln: RblnConfig, board: MetricsBoard) -> ArtifactStore | None:
    """Return the store of compiled graphs, None if the cache is disabled."""
    record = store_event_recorder(board)
    if rbln.disable_compile_cache:
        board.counter("rbln_compile_cache_requests_total", result="bypass").inc()
        return None
    return ArtifactStore(
        graph_store(Path(rbln.cache_root)),
        max_bytes=rbln.cache_max_bytes,
        read_only=rbln.cache_read_only,
        bundles=[graph_store(Path(bundle)) for bundle in rbln.cache_bundles],
        on_event=record,
    )
