"""Seconds of a step by its bucket, from recorded times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
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

    def of(self, bucket: int) -> float:
        """Return the seconds of a step of this bucket."""
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
