"""Switch for the service's metrics, for benchmarks only.

While a `Switch` is off, the recorders of steps, KV blocks, masks and requests do nothing. It is a
byte that processes share, so it can change between steps, also in a server: `plugin_folder` writes
a distribution with an entry point, which vLLM calls in every process with the folder on its path.
"""

from __future__ import annotations

from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import Any

_ENTRY_POINT = "[vllm.general_plugins]\nbench_unmetered = bench_unmetered:install_switch\n"
_MODULE = """
from pathlib import Path
from benchmarks.metrics.unmetered import Switch, install


def install_switch():
    install(Switch(Path(__file__).with_name("switch")))
"""


class Switch:
    """Switch of metrics recording: the first byte of a file, 0 for on."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(b"\0")
        with path.open("r+b") as file:
            self.cell = mmap(file.fileno(), 1)

    def turn(self, *, metered: bool) -> None:
        """Take effect at the next call of a recorder, in every process."""
        self.cell[0] = 0 if metered else 1


def recorders() -> list[tuple[type, str]]:
    """Return every method of the product that records a metric while it serves."""
    from rbln_backend.reporting.metric_cells import HistogramHandle
    from rbln_backend.scheduler.kv_metrics import KvMetrics
    from rbln_backend.worker.step.metrics import StepMetrics
    from server.observability.metrics import ServerMetrics

    server = (
        *("request", "rejection", "key", "guided", "loop_lag", "adapter_load", "reading"),
        *("connection_end", "open_connections", "tier", "key_rejection"),
    )
    return [
        (StepMetrics, "record"),
        (KvMetrics, "update"),
        (HistogramHandle, "observe"),
        *((ServerMetrics, f"observe_{name}") for name in server),
    ]


def install(switch: Switch) -> Callable[[], None]:
    """Make recorders of this process follow `switch`; return a function that undoes it."""
    before = [(owner, name, getattr(owner, name)) for owner, name in recorders()]
    for owner, name, method in before:
        setattr(owner, name, _switched(method, switch.cell))

    def undo() -> None:
        for owner, name, method in before:
            setattr(owner, name, method)

    return undo


def plugin_folder(folder: Path) -> Switch:
    """Write a distribution to `folder` that installs the switch in vLLM processes."""
    dist = folder / "bench_unmetered-0.dist-info"
    dist.mkdir(parents=True)
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-unmetered\nVersion: 0\n")
    (dist / "entry_points.txt").write_text(_ENTRY_POINT)
    (folder / "bench_unmetered.py").write_text(_MODULE)
    return Switch(folder / "switch")


def _switched(method: Callable[..., Any], cell: mmap) -> Callable[..., Any]:
    # Both sides pay for this call; the metrics' side counts it as their cost.
    def record(*args: Any, **kwargs: Any) -> Any:
        return None if cell[0] else method(*args, **kwargs)

    return record
