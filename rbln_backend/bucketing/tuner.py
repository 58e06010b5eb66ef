"""The set of buckets that a recorded mix of sizes would have run fastest on.

A step of n rows costs what a step of the next bucket costs, so that padding is paid in step time.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rbln_backend.bucketing.search import BucketSearch
from rbln_backend.bucketing.table import BucketTable
from rbln_backend.errors import BucketError


class StepTimes:
    """Seconds of a step by its bucket, from mean times measured on some buckets.

    Linear between measured buckets and beyond them, never less for a larger bucket. One measured
    bucket says nothing of smaller ones, which then cost the same. Without any measurement a step
    costs its rows, which makes padded rows the thing to save.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        self._sizes = sorted(measured)
        highest = 0.0
        self._seconds: list[float] = []
        for size in self._sizes:
            # A rarely used bucket may have measured too little time.
            highest = max(highest, measured[size])
            self._seconds.append(highest)

    def of(self, bucket: int, rows: int = 0) -> float:  # noqa: ARG002
        """Return the seconds of a step of this bucket; how many `rows` it holds is not known."""
        return self._between(bucket)

    def _between(self, bucket: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return float(bucket)
        if len(sizes) == 1:
            return seconds[0] * bucket / sizes[0] if bucket > sizes[0] else seconds[0]
        right = min(max(bisect_left(sizes, bucket), 1), len(sizes) - 1)
        span = sizes[right] - sizes[right - 1]
        slope = (seconds[right] - seconds[right - 1]) / span
        return max(seconds[right - 1] + slope * (bucket - sizes[right - 1]), 0.0)

    def candidate(self, size: int) -> int:
        """Return the bucket that would be made for steps of this size."""
        return size

    def priced(self, seconds: float) -> Self:
        """Return these times where each row of a bucket takes so many seconds more."""
        dearer = copy.copy(self)
        dearer._seconds = [
            old + seconds * size for old, size in zip(self._seconds, self._sizes, strict=True)
        ]
        return dearer


class MeasuredTimes(StepTimes):
    """Seconds of a step by its bucket, where every bucket that may be suggested was measured.

    They are taken as they are: kernels have sizes that suit them, so that a larger bucket may be
    the faster one, and nothing between two measured buckets is believed.

    `full` are the seconds of full buckets. A row that holds nothing takes `row` seconds less: no
    keys are read for it, and no token is chosen. `ran` are seconds by bucket and rows where such
    steps were measured themselves.
    """

    def __init__(
        self,
        full: Mapping[int, float],
        row: float,
        ran: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        super().__init__(full)
        self._ran = ran or {}
        self._seconds = [full[size] - row * size for size in self._sizes]
        self.full, self.row = dict(full), row

    def of(self, bucket: int, rows: int = 0) -> float:
        """Return the seconds of a step of this bucket that holds `rows`."""
        return self._ran.get((bucket, rows), self._between(bucket) + self.row * rows)

    def candidate(self, size: int) -> int:
        """Return the fastest measured bucket that holds `size`; one at least has to."""
        first = bisect_left(self._sizes, size)
        _, bucket = min(zip(self._seconds[first:], self._sizes[first:], strict=True))
        return bucket


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Buckets and what they would have saved on the recorded steps.

    Seconds are predicted for both sets by the same `StepTimes`.
    """

    buckets: tuple[int, ...]
    steps: int
    seconds_now: float
    seconds_then: float
    padded_rows_now: int
    padded_rows_then: int

    @property
    def saving(self) -> float:
        """The share of the steps' time that would be saved, 0 to 1."""
        return 1.0 - self.seconds_then / self.seconds_now if self.seconds_now > 0 else 0.0


def suggest_buckets(
    counts: Mapping[int, int],
    times: StepTimes,
    current: BucketTable,
    limit: int,
    slack: float = 0.0,
) -> Suggestion:
    """Return the best set of at most `limit` buckets for steps counted by their real size.

    Best among the candidates of `times`: the least seconds, or a set that takes up to `slack` of
    them more and pads fewer rows. The largest of the current buckets stays: it is what the engine
    may be asked for. Raises `BucketError` when a size does not fit into it or `limit` is not
    positive.
    """
    if limit < 1:
        raise BucketError(f"The number of buckets must be greater than 0, got {limit}")
    if counts and not 1 <= min(counts) <= max(counts) <= current.largest:
        raise BucketError(
            f"Recorded sizes {min(counts)} to {max(counts)} do not fit into buckets up to "
            f"{current.largest}"
        )
    seen = {size: count for size, count in counts.items() if count > 0}
    best = _best_table(seen, times, current.largest, limit)
    if slack and seen:
        best = _least_padded(seen, times, best, limit, slack)
    seconds_now, padded_now = _cost(seen, times, current)
    seconds_then, padded_then = _cost(seen, times, best)
    return Suggestion(
        buckets=best.sizes,
        steps=sum(seen.values()),
        seconds_now=seconds_now,
        seconds_then=seconds_then,
        padded_rows_now=padded_now,
        padded_rows_then=padded_then,
    )


def padding_share(counts: Mapping[int, int], table: BucketTable) -> float:
    """Return the share of the rows, or tokens, computed that held nothing; 0 without steps."""
    real = sum(size * count for size, count in counts.items())
    computed = sum(table.find(size) * count for size, count in counts.items())
    return 1.0 - real / computed if computed else 0.0


def _best_table(
    counts: Mapping[int, int], times: StepTimes, largest: int, limit: int
) -> BucketTable:
    """The set of the least seconds; `largest` is always taken."""
    wanted: Counter[int] = Counter()
    for size, count in counts.items():
        wanted[times.candidate(size)] += count
    sizes = sorted({*wanted, largest})
    search = BucketSearch([wanted[size] for size in sizes], [times.of(size) for size in sizes])
    for _ in range(1, min(limit, len(sizes))):
        search.one_more_bucket()
    return BucketTable(tuple(sizes[index] for index in search.best_path()))


def _least_padded(
    counts: Mapping[int, int], times: StepTimes, best: BucketTable, limit: int, slack: float
) -> BucketTable:
    """A set of fewer padded rows than `best`, if one takes at most `slack` of its seconds more.

    The dearer a row, the fewer are padded and the longer all steps take: the highest price that
    the slack allows is looked for, from a 256th of what a row takes to its double.
    """
    found, (seconds, padded) = best, _cost(counts, times, best)
    row = seconds / sum(size * count for size, count in counts.items())
    for power in range(-8, 2):
        other = _best_table(counts, times.priced(row * 2.0**power), best.largest, limit)
        taken, left = _cost(counts, times, other)
        if taken <= seconds * (1.0 + slack) and left < padded:
            found, padded = other, left
    return found


def _cost(counts: Mapping[int, int], times: StepTimes, table: BucketTable) -> tuple[float, int]:
    """Return the seconds and the padded rows of all steps."""
    seconds, padded = 0.0, 0
    for size, count in counts.items():
        bucket = table.find(size)
        seconds += count * times.of(bucket, size)
        padded += count * (bucket - size)
    return seconds, padded
