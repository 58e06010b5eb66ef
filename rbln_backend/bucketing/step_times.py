"""Seconds of a step by its bucket, from recorded or measured times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from itertools import accumulate


class StepTimes:
    """Seconds of a step by its bucket, from mean times recorded of some buckets.

    Linear between them and beyond, never less for a larger bucket. One recorded bucket says nothing
    of smaller ones, which then cost the same. Without any a step costs its rows, which makes padded
    rows the thing to save.
    """

    def __init__(self, recorded: Mapping[int, float]) -> None:
        self._sizes = sorted(recorded)
        # A rarely used bucket may have recorded too little time.
        self._seconds = list(accumulate((recorded[size] for size in self._sizes), max))

    def of(self, bucket: int, rows: int = 0) -> float:  # noqa: ARG002
        """Return the seconds of a step of this bucket; how many `rows` it holds is not known."""
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return float(bucket)
        if len(sizes) == 1:
            return seconds[0] * max(bucket / sizes[0], 1.0)
        right = min(max(bisect_left(sizes, bucket), 1), len(sizes) - 1)
        span = sizes[right] - sizes[right - 1]
        slope = (seconds[right] - seconds[right - 1]) / span
        return max(seconds[right - 1] + slope * (bucket - sizes[right - 1]), 0.0)

    def choices(self, sizes: Collection[int]) -> Collection[int]:
        """Return the buckets that may be suggested for steps of these sizes."""
        return sizes


class MeasuredTimes(StepTimes):
    """Seconds of a step by its bucket, where every bucket that may be suggested was measured.

    They are taken as they are: kernels have sizes that suit them, so that a larger bucket may be
    the faster one, and nothing between two measured buckets is believed. A row that holds nothing
    takes `row` seconds less than one of a `full` bucket: no keys are read for it, and no token is
    chosen. `ran` are seconds by bucket and rows where such steps were measured themselves.
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
        """Return what was measured."""
        return self.full
