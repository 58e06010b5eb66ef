"""Seconds of a step by its bucket, from recorded or measured times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from itertools import accumulate


class StepTimes:
    """Seconds of a step by its bucket, interpolated from the mean times of some buckets.

    Linear between recorded buckets and beyond, and never less for a larger bucket. A bucket below
    all recorded ones takes at least its share of the smallest one's time. With a single recorded
    bucket, smaller ones take the same time. Without any, a step takes as many seconds as
    it has rows, so that the least padding is best.
    """

    def __init__(self, recorded: Mapping[int, float]) -> None:
        self._sizes = sorted(recorded)
        # The mean of a rarely used bucket may be too small.
        self._seconds = list(accumulate((recorded[size] for size in self._sizes), max))

    def of(self, bucket: int, rows: int = 0) -> float:  # noqa: ARG002
        """Return the seconds of a step of this bucket, whatever `rows` it holds."""
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return float(bucket)
        if len(sizes) == 1:
            return seconds[0] * max(bucket / sizes[0], 1.0)
        right = min(max(bisect_left(sizes, bucket), 1), len(sizes) - 1)
        span = sizes[right] - sizes[right - 1]
        slope = (seconds[right] - seconds[right - 1]) / span
        taken = seconds[right - 1] + slope * (bucket - sizes[right - 1])
        # A line through two larger buckets may fall below zero.
        return max(taken, seconds[0] * bucket / sizes[0]) if bucket < sizes[0] else taken

    def choices(self, sizes: Collection[int]) -> Collection[int]:
        """Return the buckets that may be suggested for steps of these sizes."""
        return sizes


class MeasuredTimes(StepTimes):
    """Measured seconds of a step by its bucket; only measured buckets are suggested.

    Times are not smoothed: a larger bucket may be faster, because kernels prefer some sizes. A
    padded row takes `row` seconds less than a row of a `full` bucket, as it reads no keys and
    samples no token. `ran` has the seconds of steps measured with so many rows, by bucket and
    rows.
    """

    def __init__(
        self,
        full: Mapping[int, float],
        row: float,
        ran: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        super().__init__(full)
        self.full, self.row, self._ran = full, row, ran or {}

    def of(self, bucket: int, rows: int = 0) -> float:
        """Return the seconds of a step of this bucket that holds `rows`."""
        full = self.full[bucket] if bucket in self.full else super().of(bucket)
        return self._ran.get((bucket, rows), full - self.row * (bucket - rows))

    def choices(self, sizes: Collection[int]) -> Collection[int]:  # noqa: ARG002
        """Return the measured buckets."""
        return self.full
