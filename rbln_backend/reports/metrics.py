"""The engine's metrics: their declarations, and the board that holds a worker's values.

A worker writes its values into memory-mapped files in prometheus_client's multiprocess format under
`<run_dir>/metrics`. The API process exports them with
`prometheus_client.multiprocess.MultiProcessCollector(registry, path=...)`, without a call to the
worker. A collector never reads an incomplete file; a restarted rank starts from zero; counters and
histograms of all ranks add up, so that one rank of an engine counts its steps (`RankPlace`), while
each rank counts its own compiles.
"""

from __future__ import annotations

import logging
import mmap
import statistics
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.utils import floatToGoString

_COMPILE_BUCKETS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0)
_LOCK_BUCKETS = (0.001, 0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0)
_STEP_BUCKETS = (
    0.0005,
    0.001,
    0.002,
    0.004,
    0.008,
    0.015,
    0.03,
    0.06,
    0.12,
    0.25,
    0.5,
    1.0,
    2.0,
    5.0,
    15.0,
)
_FIRST_TOKEN_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
    250.0,
)
_MASK_BUCKETS = (
    0.00002,
    0.00005,
    0.0001,
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.5,
)


@dataclass(frozen=True, slots=True)
class MetricDecl:
    """One metric: `kind` is counter, gauge or histogram; `buckets` are a histogram's bounds.

    `across_ranks` combines several ranks' gauges with the same labels: mostrecent, sum or max.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    across_ranks: str = "mostrecent"


def _metric(
    name: str,
    about: str,
    labels: str = "",
    buckets: tuple[float, ...] = (),
    across_ranks: str = "mostrecent",
) -> MetricDecl:
    """Return a declaration; the ending ``_total`` makes a counter, bounds make a histogram."""
    kind = "counter" if name.endswith("_total") else "histogram" if buckets else "gauge"
    return MetricDecl(name, kind, about, tuple(labels.split()), buckets, across_ranks)


# Names, labels and buckets are an interface of dashboards.
METRICS: tuple[MetricDecl, ...] = (
    _metric(
        "rbln_compile_seconds",
        "Seconds to compile a graph or load it from the store, by kind (prefill, decode, verify, "
        "logits, pooling) and result (compiled, loaded). Each rank counts its own.",
        "kind result",
        buckets=_COMPILE_BUCKETS,
    ),
    _metric(
        "rbln_graphs",
        "Graphs in memory, by kind and result (compiled, loaded).",
        "kind result",
        across_ranks="max",
    ),
    _metric(
        "rbln_compile_cache_requests_total",
        "Look-ups in the artifact store, by result (hit, miss, corrupt, bypass).",
        "result",
    ),
    _metric(
        "rbln_compile_cache_writes_total",
        "Writes of artifacts to the store, by result (stored, failed, read_only).",
        "result",
    ),
    _metric("rbln_compile_cache_size_bytes", "Bytes of all artifacts in the store."),
    _metric("rbln_compile_cache_entries", "Artifacts in the store."),
    _metric(
        "rbln_compile_cache_lock_wait_seconds",
        "Seconds spent waiting for another process that compiled the same graph.",
        buckets=_LOCK_BUCKETS,
    ),
    _metric(
        "rbln_recompiles_after_warmup_total",
        "Hot-path compiles: shapes that a step needed and warm-up did not compile. Must stay 0. "
        "Each rank counts its own.",
        "kind",
    ),
    _metric(
        "rbln_bucket_steps_total",
        "Steps run, by phase (prefill, decode, verify, pooling) and bucket (tokens of a chunk, "
        "rows of a batch); counted once per engine, for any number of ranks.",
        "phase bucket",
    ),
    _metric(
        "rbln_bucket_step_seconds",
        "Seconds of one step on the device, by phase and bucket; of the first rank.",
        "phase bucket",
        buckets=_STEP_BUCKETS,
    ),
    _metric(
        "rbln_bucket_useful_rows_total",
        "Rows of steps that held a request, by phase and bucket; in prefill, the requests.",
        "phase bucket",
    ),
    _metric(
        "rbln_bucket_padded_rows_total",
        "Rows of steps that were padding, by phase and bucket.",
        "phase bucket",
    ),
    _metric(
        "rbln_prefill_useful_tokens_total",
        "Prompt tokens computed in prefill steps, by chunk size.",
        "chunk",
    ),
    _metric(
        "rbln_prefill_padded_tokens_total",
        "Tokens of prefill steps that were padding, by chunk size.",
        "chunk",
    ),
    _metric(
        "rbln_kv_tier_reads_total",
        "Pages of prefixes looked up in the KV tiers, by result (memory, folder, miss, damaged).",
        "result",
    ),
    _metric(
        "rbln_kv_tier_writes_total",
        "Pages of prefixes given to the KV tiers, by result (memory, folder, failed).",
        "result",
    ),
    _metric(
        "rbln_kv_tier_tokens_total", "Tokens whose keys and values came back from the KV tiers."
    ),
    _metric(
        "rbln_kv_tier_bytes",
        "Bytes that each KV tier holds (memory, folder); a folder's of all its servers.",
        "tier",
    ),
    _metric(
        "rbln_prefix_hit_tokens_total",
        "Tokens found in the prefix cache: in shared blocks (block), in copied heads of blocks "
        "(sub_block), in models with window layers only (window).",
        "kind",
    ),
    _metric(
        "rbln_draft_tokens_total",
        "Draft tokens that steps checked, by bucket (requests x tokens of each).",
        "bucket",
    ),
    _metric("rbln_draft_accepted_tokens_total", "Accepted draft tokens, by bucket.", "bucket"),
    _metric(
        "rbln_draft_gain_total",
        "Sum over steps with drafts of their measured tokens per second relative to a step "
        "without, by bucket.",
        "bucket",
    ),
    _metric(
        "rbln_background_rows_total",
        "Rows of decode steps with background requests: answer tokens in padding of the "
        "foreground's bucket (padding), prompt tokens there (prompt), or steps without a "
        "foreground (alone).",
        "kind",
    ),
    _metric(
        "rbln_first_token_seconds",
        "Seconds from a request's arrival to its first token, by tokens of the prompt (to_256, "
        "to_2048, to_16384, more); background requests are not counted.",
        "prompt",
        buckets=_FIRST_TOKEN_BUCKETS,
    ),
    _metric(
        "rbln_prefill_overtaken_total",
        "Prompts that waited, or continued later, while a prompt that arrived later was computed "
        "(prefill_policy shortest).",
    ),
    _metric(
        "rbln_prefill_overtaken_seconds",
        "Seconds from the first chunk of a later prompt to the next chunk of the overtaken one.",
        buckets=_FIRST_TOKEN_BUCKETS,
    ),
    _metric("rbln_background_parked", "Background requests that hold KV blocks but no row."),
    _metric(
        "rbln_background_preemptions_total",
        "Background requests that lost their KV blocks to the foreground.",
    ),
    _metric(
        "rbln_kv_blocks",
        "KV blocks for requests, by KV cache group and its kind (paged, window).",
        "group kind",
        across_ranks="sum",
    ),
    _metric(
        "rbln_kv_blocks_used",
        "KV blocks in use by requests, by KV cache group and its kind (paged, window).",
        "group kind",
        across_ranks="sum",
    ),
    _metric(
        "rbln_window_log_pages",
        "Pages of the prefix log of a sliding window, by KV cache group.",
        "group",
        across_ranks="sum",
    ),
    _metric(
        "rbln_window_log_pages_used",
        "Pages of the prefix log that hold a prefix, by KV cache group.",
        "group",
        across_ranks="sum",
    ),
    _metric(
        "rbln_startup_phase_seconds",
        "Seconds of a start-up phase (init, load, compile, warmup), slowest rank.",
        "phase",
        across_ranks="max",
    ),
    _metric(
        "rbln_engine_last_step_timestamp_seconds",
        "Unix time of the end of an engine's latest step; before the first step, of its ready "
        "state.",
        "engine",
        across_ranks="max",
    ),
    _metric(
        "rbln_grammar_mask_seconds",
        "Seconds of a step spent on grammars, by part: fill (compute the allowed tokens, beside "
        "the forward pass), wait (for the rest of it, after the forward pass) and apply (mask the "
        "logits).",
        "part",
        buckets=_MASK_BUCKETS,
    ),
    _metric("rbln_lora_slots", "LoRA adapter slots of an engine.", across_ranks="max"),
    _metric(
        "rbln_lora_slots_used",
        "LoRA adapter slots in use; the maximum over engines.",
        across_ranks="max",
    ),
    _metric(
        "rbln_device_memory_bytes",
        "Device memory in use by kind (weights, kv, lora), all ranks together.",
        "kind",
        across_ranks="sum",
    ),
)


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
        return self._handle(CounterHandle, name, labels)

    def gauge(self, name: str, **labels: object) -> GaugeHandle:
        return self._handle(GaugeHandle, name, labels)

    def histogram(self, name: str, **labels: object) -> HistogramHandle:
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
        raise ValueError(f"Metric {name!r} is not declared in reports/metrics.py")
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


_NAMES = ("rbln_draft_tokens_total", "rbln_draft_accepted_tokens_total", "rbln_draft_gain_total")


class DraftCounts:
    """Checked and accepted drafts, and gains, by the size of the verify graph."""

    def __init__(self, board: MetricsBoard, sizes: Iterable[tuple[int, int]]) -> None:
        """``sizes`` are the compiled ones: requests, and tokens of each."""
        self._cells: dict[tuple[int, int], tuple[CounterHandle, ...]] = {
            (requests, tokens): tuple(
                board.counter(name, bucket=f"{requests}x{tokens}") for name in _NAMES
            )
            for requests, tokens in sizes
        }

    def record(self, size: tuple[int, int], *, checked: int, accepted: int, gain: float) -> None:
        """Count one step; ``gain`` is the ratio of tokens per second with and without drafts."""
        for cell, amount in zip(self._cells[size], (checked, accepted, gain), strict=True):
            cell.inc(amount)


logger = logging.getLogger(__name__)

_LATEST = 1000


class BatchSizeLog:
    """Counts of all steps since the process began; used from the step loop."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._steps: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[tuple[str, int], deque[float]] = defaultdict(
            partial(deque, maxlen=_LATEST)
        )
        self._logged_at = time.monotonic()
        self._has_news = False

    def note(self, phase: str, size: int, seconds: float) -> None:
        self._steps[phase, size] += 1
        self._seconds[phase, size].append(seconds)
        self._has_news = True
        if time.monotonic() - self._logged_at >= self._interval_s:
            self.log()

    def log(self) -> None:
        """Write a line if steps ran since the previous one."""
        if not self._has_news:
            return
        self._has_news, self._logged_at = False, time.monotonic()
        logger.info(
            "Batchsize forward time stats (batchsize, count, median_time(ms)): "
            "%s decode, %s prefill",
            self._stats("decode"),
            self._stats("prefill"),
        )

    def _stats(self, phase: str) -> list[tuple[int, int, float]]:
        """Return size, count and median milliseconds, most frequent first."""
        found = [
            (size, steps, round(statistics.median(self._seconds[of, size]) * 1000.0, 2))
            for (of, size), steps in self._steps.items()
            if of == phase
        ]
        return sorted(found, key=lambda stats: -stats[1])


_KEY = '["rbln_bucket_useful_rows"'
"""Prefix of this counter's keys. It does not count steps that are only padding."""


def computed_rows(run_dir: Path, engines: int) -> float | None:
    """Return the rows of requests in all steps so far.

    None if fewer than ``engines`` engines have files on this host: the others may compute.
    """
    boards: list[float] = []
    for path in (run_dir / "metrics").glob("counter_*.db"):
        values = MmapedDict.read_all_values_from_file(str(path))  # type: ignore[no-untyped-call]
        if rows := [value for key, value, *_ in values if key.startswith(_KEY)]:
            boards.append(sum(rows))
    return sum(boards) if len(boards) >= engines else None
