"""Cells of memory-mapped metric files, and the handles that write them.

The files have the multiprocess format of prometheus_client; `reporting.stats` declares the metrics
and names the files.
"""

from __future__ import annotations

import mmap
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict

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
