"""The engine's metrics: one declaration, and the board on which a worker keeps them.

A worker writes its values into memory-mapped files of prometheus_client's own multiprocess
format under `<run_dir>/metrics`; the API process exports them with
`prometheus_client.multiprocess.MultiProcessCollector(registry, path=...)`, without asking the
worker. Invariants (tests/unit/backend/test_stats.py): a collector never meets a half-made
file; a restarted rank starts from zero; counters and histograms of all ranks add up, so among
the ranks of one tensor-parallel group only the first counts steps.
"""

from __future__ import annotations

import mmap
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.utils import floatToGoString

_COMPILE_BUCKETS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0)
_LOCK_BUCKETS = (0.001, 0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0)
_STEP_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06),
    *(0.12, 0.25, 0.5, 1.0, 2.0, 5.0, 15.0),
)

_DOUBLE = 8


@dataclass(frozen=True, slots=True)
class MetricDecl:
    """One metric: `kind` is counter, gauge or histogram; `buckets` are a histogram's bounds.

    `across_ranks` says what several ranks' gauges with the same labels become: mostrecent,
    sum or max.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    across_ranks: str = "mostrecent"


METRICS: tuple[MetricDecl, ...] = (
    MetricDecl(
        "rbln_compile_seconds",
        "histogram",
        "Seconds to compile a graph or load it from the store, "
        "by kind (prefill, decode, logits, pooling) and result (compiled, loaded).",
        ("kind", "result"),
        _COMPILE_BUCKETS,
    ),
    MetricDecl(
        "rbln_graphs",
        "gauge",
        "Graphs in memory, by kind and by whether they were compiled or loaded.",
        ("kind", "result"),
        across_ranks="max",
    ),
    MetricDecl(
        "rbln_compile_cache_requests_total",
        "counter",
        "Look-ups in the artifact store, by result (hit, miss, corrupt, bypass).",
        ("result",),
    ),
    MetricDecl(
        "rbln_compile_cache_writes_total",
        "counter",
        "Artifacts offered to the store, by result (stored, failed, read_only).",
        ("result",),
    ),
    MetricDecl("rbln_compile_cache_size_bytes", "gauge", "Bytes of all artifacts in the store."),
    MetricDecl("rbln_compile_cache_entries", "gauge", "Artifacts in the store."),
    MetricDecl(
        "rbln_compile_cache_lock_wait_seconds",
        "histogram",
        "Seconds spent waiting for another process that compiled the same graph.",
        (),
        _LOCK_BUCKETS,
    ),
    MetricDecl(
        "rbln_recompiles_after_warmup_total",
        "counter",
        "Hot-path compiles: shapes that a step needed and warm-up had left out. Must stay 0.",
        ("kind",),
    ),
    MetricDecl(
        "rbln_bucket_steps_total",
        "counter",
        "Steps run, by phase (prefill, decode, pooling) and bucket (tokens of a chunk, rows of a "
        "batch).",
        ("phase", "bucket"),
    ),
    MetricDecl(
        "rbln_bucket_step_seconds",
        "histogram",
        "Seconds of one step on the device, by phase and bucket.",
        ("phase", "bucket"),
        _STEP_BUCKETS,
    ),
    MetricDecl(
        "rbln_bucket_useful_rows_total",
        "counter",
        "Rows of steps that held a request, by phase and bucket.",
        ("phase", "bucket"),
    ),
    MetricDecl(
        "rbln_bucket_padded_rows_total",
        "counter",
        "Rows of steps that were padding, by phase and bucket.",
        ("phase", "bucket"),
    ),
    MetricDecl(
        "rbln_prefill_useful_tokens_total",
        "counter",
        "Prompt tokens computed in prefill steps, by chunk size.",
        ("chunk",),
    ),
    MetricDecl(
        "rbln_prefill_padded_tokens_total",
        "counter",
        "Tokens of prefill steps that were padding, by chunk size.",
        ("chunk",),
    ),
    MetricDecl(
        "rbln_prefix_hit_tokens_total",
        "counter",
        "Tokens not computed thanks to the prefix cache: in shared blocks (block), in copied heads "
        "of blocks (sub_block), in models of window layers only (window).",
        ("kind",),
    ),
    MetricDecl(
        "rbln_kv_blocks",
        "gauge",
        "KV blocks that requests can have, by KV cache group and its kind (paged, window).",
        ("group", "kind"),
        across_ranks="sum",
    ),
    MetricDecl(
        "rbln_kv_blocks_used",
        "gauge",
        "KV blocks that requests hold, by KV cache group and its kind (paged, window).",
        ("group", "kind"),
        across_ranks="sum",
    ),
    MetricDecl(
        "rbln_window_log_pages",
        "gauge",
        "Pages of the prefix log of a sliding window, by KV cache group.",
        ("group",),
        across_ranks="sum",
    ),
    MetricDecl(
        "rbln_window_log_pages_used",
        "gauge",
        "Pages of the prefix log that hold a prefix, by KV cache group.",
        ("group",),
        across_ranks="sum",
    ),
    MetricDecl(
        "rbln_startup_phase_seconds",
        "gauge",
        "Seconds that a start-up phase took (init, load, compile, warmup), slowest rank.",
        ("phase",),
        across_ranks="max",
    ),
    MetricDecl(
        "rbln_engine_last_step_timestamp_seconds",
        "gauge",
        "Unix time at which the latest step ended.",
        across_ranks="max",
    ),
    MetricDecl(
        "rbln_device_memory_bytes",
        "gauge",
        "Device memory in use by kind (weights, kv, lora), all ranks together.",
        ("kind",),
        across_ranks="sum",
    ),
)
"""Every metric of the engine. Names, labels and buckets are an interface of dashboards."""

_BY_NAME = {metric.name: metric for metric in METRICS}


class _Sink:
    """Where values of one file go: a memory-mapped file, or nowhere.

    A value is ``cells[n]`` of the ``n`` that ``cell`` returned, its timestamp ``cells[n + 1]``:
    writing one is a store to memory, which steps can afford.
    """

    def __init__(self, path: Path | None) -> None:
        self.cells: memoryview[float] | list[float] = []
        self._values: MmapedDict | None = None
        self._path = path
        if path is not None:
            # Built aside: a collector that met an empty new file would fail to parse it.
            aside = path.with_suffix(".new")
            aside.unlink(missing_ok=True)
            self._values = MmapedDict(str(aside))  # type: ignore[no-untyped-call]  # untyped there
            aside.replace(path)

    def cell(self, key: str) -> int:
        """Declare ``key`` with the value 0 and return its cell."""
        if self._values is None or self._path is None:
            assert isinstance(self.cells, list)
            self.cells += [0.0, 0.0]
            return len(self.cells) - 2
        self._values.write_value(key, 0.0, 0.0)  # type: ignore[no-untyped-call]
        if len(self.cells) * _DOUBLE < self._path.stat().st_size:
            # The file grows with its keys; a mapping does not.
            with self._path.open("r+b") as file:
                self.cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        return int(self._values._positions[key]) // _DOUBLE

    def close(self) -> None:
        """Close the file. Cells can still be written to; nobody reads them."""
        if self._values is not None:
            self.cells = list(self.cells)
            self._values.close()  # type: ignore[no-untyped-call]
            self._values = None


class CounterHandle:
    """One counter with its labels bound."""

    __slots__ = ("_cell", "_lock", "_sink", "value")

    def __init__(self, sink: _Sink, lock: threading.Lock, key: str) -> None:
        self._sink, self._lock, self._cell = sink, lock, sink.cell(key)
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`, which must not be negative."""
        if amount < 0:
            raise ValueError(f"A counter only grows, got {amount}")
        with self._lock:
            self.value += amount
            self._sink.cells[self._cell] = self.value


class GaugeHandle:
    """One gauge with its labels bound; unset gauges are not exported."""

    __slots__ = ("_cell", "_key", "_lock", "_sink", "value")

    def __init__(self, sink: _Sink, lock: threading.Lock, key: str) -> None:
        self._sink, self._lock, self._key = sink, lock, key
        self._cell: int | None = None
        self.value = 0.0

    def set(self, value: float) -> None:
        """Replace the value."""
        with self._lock:
            if self._cell is None:
                self._cell = self._sink.cell(self._key)
            self.value = float(value)
            self._sink.cells[self._cell] = self.value
            self._sink.cells[self._cell + 1] = time.time()


class HistogramHandle:
    """One histogram with its labels bound; `value` is the number of observations."""

    __slots__ = ("_bounds", "_cells", "_counts", "_lock", "_sink", "_sum", "_sum_cell", "value")

    def __init__(
        self,
        sink: _Sink,
        lock: threading.Lock,
        bounds: Sequence[float],
        keys: Sequence[str],
        sum_key: str,
    ) -> None:
        self._sink, self._lock, self._bounds = sink, lock, bounds
        self._cells, self._sum_cell = [sink.cell(key) for key in keys], sink.cell(sum_key)
        self._counts = [0.0] * len(keys)
        self._sum = self.value = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        index = bisect_left(self._bounds, value)
        with self._lock:
            self.value += 1
            self._sum += value
            self._counts[index] += 1
            # The files hold each bucket by itself; the collector accumulates them.
            self._sink.cells[self._cells[index]] = self._counts[index]
            self._sink.cells[self._sum_cell] = self._sum


class MetricsBoard:
    """One rank's values. With `run_dir` None they stay in memory, for `value` to read.

    Handles are cached; the hot path keeps its own and pays one or two writes to memory.
    `rank` must be unique among the boards that share `run_dir`: a number, or another part's name.
    """

    def __init__(self, run_dir: Path | None, rank: int | str) -> None:
        self._lock = threading.Lock()
        self._sinks: dict[str, _Sink] = {}
        self._handles: dict[tuple[str, ...], CounterHandle | GaugeHandle | HistogramHandle] = {}
        directory = None if run_dir is None else run_dir / "metrics"
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        for stem in sorted({_file_stem(metric) for metric in METRICS}):
            path = None if directory is None else directory / f"{stem}_{rank}.db"
            self._sinks[stem] = _Sink(path)

    def counter(self, name: str, **labels: object) -> CounterHandle:
        """Return the counter; `ValueError` for an undeclared name, kind or set of labels."""
        handle = self._handle("counter", name, labels)
        assert isinstance(handle, CounterHandle)
        return handle

    def gauge(self, name: str, **labels: object) -> GaugeHandle:
        """Return the gauge; `ValueError` for an undeclared name, kind or set of labels."""
        handle = self._handle("gauge", name, labels)
        assert isinstance(handle, GaugeHandle)
        return handle

    def histogram(self, name: str, **labels: object) -> HistogramHandle:
        """Return the histogram; `ValueError` for an undeclared name, kind or set of labels."""
        handle = self._handle("histogram", name, labels)
        assert isinstance(handle, HistogramHandle)
        return handle

    def value(self, name: str, **labels: object) -> float:
        """Return the current value; of a histogram, the number of observations."""
        metric, label_values = _declared(name, labels)
        handle = self._handles.get((metric.name, *label_values))
        return 0.0 if handle is None else handle.value

    def close(self) -> None:
        """Close the files; the values stay readable."""
        for sink in self._sinks.values():
            sink.close()

    def _handle(
        self, kind: str, name: str, labels: dict[str, object]
    ) -> CounterHandle | GaugeHandle | HistogramHandle:
        metric, label_values = _declared(name, labels)
        if metric.kind != kind:
            raise ValueError(f"{name} is a {metric.kind}, not a {kind}")
        with self._lock:
            handle = self._handles.get((name, *label_values))
            if handle is None:
                handle = self._make(metric, label_values)
                self._handles[(name, *label_values)] = handle
        return handle

    def _make(
        self, metric: MetricDecl, label_values: tuple[str, ...]
    ) -> CounterHandle | GaugeHandle | HistogramHandle:
        sink = self._sinks[_file_stem(metric)]
        if metric.kind == "counter":
            return CounterHandle(sink, self._lock, _key(metric, "", label_values))
        if metric.kind == "gauge":
            return GaugeHandle(sink, self._lock, _key(metric, "", label_values))
        bounds = (*metric.buckets, float("inf"))
        les = [floatToGoString(bound) for bound in bounds]  # type: ignore[no-untyped-call]
        keys = [_key(metric, "_bucket", label_values, le) for le in les]
        sum_key = _key(metric, "_sum", label_values)
        return HistogramHandle(sink, self._lock, bounds, keys, sum_key)


def _file_stem(metric: MetricDecl) -> str:
    """Return the file's name up to the rank, in which the collector reads kind and mode."""
    return f"gauge_{metric.across_ranks}" if metric.kind == "gauge" else metric.kind


def _declared(name: str, labels: dict[str, object]) -> tuple[MetricDecl, tuple[str, ...]]:
    metric = _BY_NAME.get(name)
    if metric is None:
        raise ValueError(f"Metric {name!r} is not declared in rbln_backend.stats.METRICS")
    if set(labels) != set(metric.labels):
        raise ValueError(f"{name} has the labels {metric.labels}, got {tuple(labels)}")
    return metric, tuple(str(labels[label]) for label in metric.labels)


def _key(
    metric: MetricDecl, suffix: str, label_values: Sequence[str], bound: str | None = None
) -> str:
    """Return the key under which prometheus_client itself would keep this sample."""
    names = [*metric.labels] if bound is None else [*metric.labels, "le"]
    values = [*label_values] if bound is None else [*label_values, bound]
    family = metric.name.removesuffix("_total")
    return mmap_key(family, metric.name + suffix, names, values, metric.help)
