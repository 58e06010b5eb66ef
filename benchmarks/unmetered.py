"""This service without its metrics, to measure what they cost: a seam of the benchmarks alone.

Nothing is recorded while `unmetered` lasts: the recorders of steps, KV blocks, masks and requests
do nothing. A server is measured so as well: `plugin_folder` makes a distribution of nothing but an
entry point, which vLLM calls in every process that has the folder on its path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PLUGIN = "[vllm.general_plugins]\nbench_unmetered = benchmarks.unmetered:silence\n"


def recorders() -> list[tuple[type, str]]:
    """Return every method of the product that records a metric while it serves."""
    from rbln_backend.metric_cells import HistogramHandle
    from rbln_backend.scheduler.kv_metrics import KvMetrics
    from rbln_backend.worker.step_metrics import StepMetrics
    from server.observability.metrics import ServerMetrics

    server = ("request", "rejection", "key", "guided", "loop_lag", "adapter_load")
    return [
        (StepMetrics, "record"),
        (KvMetrics, "update"),
        (HistogramHandle, "observe"),
        *((ServerMetrics, f"observe_{name}") for name in server),
    ]


def silence() -> None:
    """Let nothing be recorded in this process from now on."""
    for owner, name in recorders():
        setattr(owner, name, _nothing)


@contextmanager
def unmetered() -> Iterator[None]:
    """Let nothing be recorded inside the block."""
    before = [(owner, name, getattr(owner, name)) for owner, name in recorders()]
    silence()
    try:
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def plugin_folder(folder: Path) -> Path:
    """Make `folder` one that silences every vLLM process that has it in PYTHONPATH."""
    dist = folder / "bench_unmetered-0.dist-info"
    dist.mkdir(parents=True)
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-unmetered\nVersion: 0\n")
    (dist / "entry_points.txt").write_text(_PLUGIN)
    return folder


def _nothing(*_: Any, **__: Any) -> None:
    """Record nothing."""
