"""Counts of the tiers, which their threads add to, and the metrics of the tiers."""

from __future__ import annotations

import threading
from collections import Counter

from rbln_backend.reporting.stats import MetricsBoard

READS = ("memory", "folder", "miss", "damaged")
WRITES = ("memory", "folder", "failed")


class TierCounts:
    """Pages read and written by result; of any thread."""

    def __init__(self) -> None:
        self._reads: Counter[str] = Counter()
        self._writes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add_read(self, result: str) -> None:
        with self._lock:
            self._reads[result] += 1

    def add_write(self, result: str) -> None:
        with self._lock:
            self._writes[result] += 1

    def take(self) -> tuple[Counter[str], Counter[str]]:
        """Return the reads and writes since the last call."""
        with self._lock:
            taken = self._reads, self._writes
            self._reads, self._writes = Counter(), Counter()
            return taken


class TierMetrics:
    """Copies counts to the metrics board, from one thread."""

    def __init__(self, board: MetricsBoard, counts: TierCounts) -> None:
        self._counts = counts
        self._reads = {x: board.counter("rbln_kv_tier_reads_total", result=x) for x in READS}
        self._writes = {x: board.counter("rbln_kv_tier_writes_total", result=x) for x in WRITES}
        self._tokens = board.counter("rbln_kv_tier_tokens_total")
        self._memory = board.gauge("rbln_kv_tier_bytes", tier="memory")
        self._folder = board.gauge("rbln_kv_tier_bytes", tier="folder")

    def placed(self, num_tokens: int) -> None:
        """Count tokens whose pages came back to the KV cache."""
        self._tokens.inc(num_tokens)

    def update(self, memory_bytes: int, folder_bytes: int) -> None:
        reads, writes = self._counts.take()
        for result, count in reads.items():
            self._reads[result].inc(count)
        for result, count in writes.items():
            self._writes[result].inc(count)
        # Most steps change neither, and setting a gauge costs microseconds.
        for gauge, held in ((self._memory, memory_bytes), (self._folder, folder_bytes)):
            if held != gauge.value:
                gauge.set(held)
