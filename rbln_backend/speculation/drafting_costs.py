"""Seconds of drafting after a decode step, by requests: measured at warm-up and by every run."""

from __future__ import annotations

from collections.abc import Mapping

from rbln_backend.bucketing.step_times import StepTimes
from rbln_backend.bucketing.table import BucketTable

_WINDOW = 8
"""Runs that a time is a running mean of."""
_OUTLIER = 2.0
"""Times the mean: a slower run counts as this much, because something interrupted it."""


class DraftingCosts:
    """Expected seconds of a draft model's graphs after a decode step."""

    def __init__(self, table: BucketTable, measured: Mapping[int, float]) -> None:
        """``measured``: seconds by bucket of ``table``; others are interpolated."""
        times = StepTimes(measured)
        self._table = table
        self._seconds = {n: times.of(n) if measured else 0.0 for n in table}

    def seconds(self, requests: int) -> float:
        """Return the expected seconds for ``requests``."""
        return self._seconds[self._bucket(requests)]

    def record(self, requests: int, seconds: float) -> None:
        """Update with a run."""
        bucket = self._bucket(requests)
        mean = self._seconds[bucket]
        latest = min(seconds, _OUTLIER * mean) if mean else seconds
        self._seconds[bucket] = mean + (latest - mean) / _WINDOW if mean else latest

    def _bucket(self, requests: int) -> int:
        """Larger batches, of buckets added since the start, run in several pieces."""
        return self._table.find(min(requests, self._table.largest))
