"""The board that holds a worker's values of the declared metrics, and its handles.

A worker writes its values into memory-mapped files in prometheus_client's multiprocess format under
`<run_dir>/metrics`. The API process exports them with
`prometheus_client.multiprocess.MultiProcessCollector(registry, path=...)`, without a call to the
worker. Invariants (tests/unit/reporting/test_stats.py): a collector never reads an incomplete file;
a restarted rank starts from zero; counters and histograms of all ranks add up, so that one rank of
an engine counts its steps (`reporting.progress.RankPlace`), while each rank counts its own
compiles.
"""

from __future__ import annotations

import mmap
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.utils import floatToGoString

from rbln_backend.reporting.metrics import METRICS, MetricDecl

_DOUBLE = 8


class Sink:
    """Values of one memory-mapped file, or of process memory if there is no path.

    ``cell`` returns an index ``n``; the value is ``cells[n]``, its timestamp ``cells[n + 1]``.
    Writing a value is one store to memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.cells: memoryview[float] | list[float] = []
        self._values: MmapedDict | None = None
        self._path = path
        if path is not None:
            # Built under another name: a collector cannot parse an empty new file.
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
            # The file grows with its keys, a mapping does not.
            with self._path.open("r+b") as file:
                self.cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        return int(self._values._positions[key]) // _DOUBLE

    def close(self) -> None:
        """Close the file. Cells remain writable in process memory."""
        if self._values is not None:
            self.cells = list(self.cells)
            self._values.close()  # type: ignore[no-untyped-call]
            self._values = None


class CounterHandle:
    """One counter with its labels bound."""

    __slots__ = ("_cell", "_lock", "_sink", "value")

    def __init__(self, sink: Sink, lock: threading.Lock, key: str) -> None:
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

    def __init__(self, sink: Sink, lock: threading.Lock, key: str) -> None:
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

    def set_to_now(self) -> None:
        """Replace the value by the Unix time in seconds."""
        now = time.time()
        with self._lock:
            if self._cell is None:
                self._cell = self._sink.cell(self._key)
            cells = self._sink.cells
            self.value = cells[self._cell] = cells[self._cell + 1] = now


class HistogramHandle:
    """One histogram with its labels bound; `value` is the number of observations."""

    __slots__ = ("_bounds", "_cells", "_counts", "_lock", "_sink", "_sum", "_sum_cell", "value")

    def __init__(
        self,
        sink: Sink,
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
            # Files hold single buckets; the collector accumulates them.
            self._sink.cells[self._cells[index]] = self._counts[index]
            self._sink.cells[self._sum_cell] = self._sum


class StepCells:
    """Series that every step adds to, in one call from their only writing thread.

    A graph's weights evict Python's objects from the processor's caches: each further call and
    object costs a step more than the arithmetic.
    """

    __slots__ = ("_padded", "_seconds", "_steps", "_useful")

    def __init__(
        self,
        steps: CounterHandle,
        seconds: HistogramHandle,
        useful: CounterHandle,
        padded: CounterHandle,
    ) -> None:
        self._steps, self._seconds, self._useful, self._padded = steps, seconds, useful, padded

    def add(self, useful: int, padded: int, seconds: float) -> None:
        """Count a step."""
        counter = self._steps
        cells = counter._sink.cells
        counter.value = cells[counter._cell] = counter.value + 1.0
        if useful:
            counter = self._useful
            counter.value = cells[counter._cell] = counter.value + useful
        if padded:
            counter = self._padded
            counter.value = cells[counter._cell] = counter.value + padded
        histogram = self._seconds
        index = bisect_left(histogram._bounds, seconds)
        cells, counts = histogram._sink.cells, histogram._counts
        histogram.value += 1
        counts[index] = cells[histogram._cells[index]] = counts[index] + 1.0
        histogram._sum = cells[histogram._sum_cell] = histogram._sum + seconds


"""Every metric of the engine. Names, labels and buckets are an interface of dashboards."""

AnyHandle = CounterHandle | GaugeHandle | HistogramHandle
_Handle = TypeVar("_Handle", bound=AnyHandle)
_KINDS: dict[type, str] = {
    CounterHandle: "counter",
    GaugeHandle: "gauge",
    HistogramHandle: "histogram",
}
_BY_NAME = {metric.name: metric for metric in METRICS}


class MetricsBoard:
    """Values of one rank; with `run_dir` None they stay in process memory.

    Handles are cached; the hot path holds its handles and pays one or two writes to memory.
    `rank` must be unique among the boards that share `run_dir`: a number, or a component's name.
    """

    def __init__(self, run_dir: Path | None, rank: int | str) -> None:
        self._lock = threading.Lock()
        self._sinks: dict[str, Sink] = {}
        self._handles: dict[tuple[str, ...], AnyHandle] = {}
        directory = None if run_dir is None else run_dir / "metrics"
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        for stem in sorted({_file_stem(metric) for metric in METRICS}):
            path = None if directory is None else directory / f"{stem}_{rank}.db"
            self._sinks[stem] = Sink(path)

    def only_if(self, counts: bool) -> MetricsBoard:
        """Return this board, or an unread one if another rank counts the same value."""
        return self if counts else MetricsBoard(None, 0)

    def counter(self, name: str, **labels: object) -> CounterHandle:
        """Return the counter; `ValueError` for an undeclared name, kind or set of labels."""
        return self._handle(CounterHandle, name, labels)

    def gauge(self, name: str, **labels: object) -> GaugeHandle:
        """Return the gauge; `ValueError` for an undeclared name, kind or set of labels."""
        return self._handle(GaugeHandle, name, labels)

    def histogram(self, name: str, **labels: object) -> HistogramHandle:
        """Return the histogram; `ValueError` for an undeclared name, kind or set of labels."""
        return self._handle(HistogramHandle, name, labels)

    def value(self, name: str, **labels: object) -> float:
        """Return the current value; of a histogram, the number of observations."""
        metric, label_values = _declared(name, labels)
        handle = self._handles.get((metric.name, *label_values))
        return 0.0 if handle is None else handle.value

    def close(self) -> None:
        """Close the files; the values stay readable."""
        for sink in self._sinks.values():
            sink.close()

    def _handle(self, kind: type[_Handle], name: str, labels: dict[str, object]) -> _Handle:
        metric, label_values = _declared(name, labels)
        if metric.kind != _KINDS[kind]:
            raise ValueError(f"{name} is a {metric.kind}, not a {_KINDS[kind]}")
        with self._lock:
            handle = self._handles.get((name, *label_values))
            if handle is None:
                handle = self._handles[(name, *label_values)] = self._make(metric, label_values)
        assert isinstance(handle, kind)
        return handle

    def _make(self, metric: MetricDecl, label_values: tuple[str, ...]) -> AnyHandle:
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
    """Return the file name up to the rank, from which the collector reads kind and mode."""
    return f"gauge_{metric.across_ranks}" if metric.kind == "gauge" else metric.kind


def _declared(name: str, labels: dict[str, object]) -> tuple[MetricDecl, tuple[str, ...]]:
    metric = _BY_NAME.get(name)
    if metric is None:
        raise ValueError(f"Metric {name!r} is not declared in reporting/metrics.py")
    if set(labels) != set(metric.labels):
        raise ValueError(f"{name} has the labels {metric.labels}, got {tuple(labels)}")
    return metric, tuple(str(labels[label]) for label in metric.labels)


def _key(
    metric: MetricDecl, suffix: str, label_values: Sequence[str], bound: str | None = None
) -> str:
    """Return prometheus_client's key of this sample."""
    names = [*metric.labels] if bound is None else [*metric.labels, "le"]
    values = [*label_values] if bound is None else [*label_values, bound]
    family = metric.name.removesuffix("_total")
    return mmap_key(family, metric.name + suffix, names, values, metric.help)


_NAMES = (
    "rbln_draft_tokens_total",
    "rbln_draft_accepted_tokens_total",
    "rbln_draft_gain_total",
)


class DraftCounts:
    """Checked and accepted drafts, and gains, by the size of the verify graph."""

    def __init__(self, board: MetricsBoard, sizes: Iterable[tuple[int, int]]) -> None:
        """``sizes`` are the compiled ones: requests, and tokens of each."""
        self._cells: dict[tuple[int, int], tuple[CounterHandle, ...]] = {
            size: tuple(board.counter(name, bucket=_shown(size)) for name in _NAMES)
            for size in sizes
        }

    def record(
        self,
        size: tuple[int, int],
        *,
        checked: int,
        accepted: int,
        gain: float,
    ) -> None:
        """Count one step; ``gain`` is the ratio of tokens per second with and without drafts."""
        for cell, amount in zip(self._cells[size], (checked, accepted, gain), strict=True):
            cell.inc(amount)


def _shown(size: tuple[int, int]) -> str:
    requests, tokens = size
    return f"{requests}x{tokens}"
