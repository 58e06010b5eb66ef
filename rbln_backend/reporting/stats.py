"""The board that holds a worker's values of the declared metrics.

A worker writes its values into memory-mapped files in prometheus_client's multiprocess format under
`<run_dir>/metrics`. The API process exports them with
`prometheus_client.multiprocess.MultiProcessCollector(registry, path=...)`, without a call to the
worker. Invariants (tests/unit/reporting/test_stats.py): a collector never reads an incomplete file;
a restarted rank starts from zero; counters and histograms of all ranks add up, so that one rank of
an engine counts its steps (`reporting.ranks`), while each rank counts its own compiles.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from prometheus_client.mmap_dict import mmap_key
from prometheus_client.utils import floatToGoString

from rbln_backend.reporting.declared_metrics import METRICS, MetricDecl
from rbln_backend.reporting.metric_cells import CounterHandle, GaugeHandle, HistogramHandle, Sink

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
        raise ValueError(f"Metric {name!r} is not declared in reporting/declared_metrics.py")
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
