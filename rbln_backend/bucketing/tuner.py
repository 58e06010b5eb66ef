"""The set of buckets that a recorded mix of sizes would have run fastest on.

A step of n rows costs what a step of the next bucket costs, so that padding is paid in step time.
Among all sets of at most `limit` buckets the best is found exactly, by dynamic programming over
the sizes that were seen: a bucket between two of them would only pad the smaller one more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

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


class MeasuredTimes(StepTimes):
    """Seconds of a step by its bucket, where every bucket that may be suggested was measured.

    They are taken as they are: kernels have sizes that suit them, so that a larger bucket may be
    the faster one, and nothing between two measured buckets is believed.

    `full` are the seconds of full buckets. A row that holds nothing takes `row` seconds less: no
    keys are read for it, and no token is chosen.
    """

    def __init__(self, full: Mapping[int, float], row: float) -> None:
        super().__init__(full)
        self._seconds = [full[size] - row * size for size in self._sizes]
        self._row = row

    def of(self, bucket: int, rows: int = 0) -> float:
        """Return the seconds of a step of this bucket that holds `rows`."""
        return self._between(bucket) + self._row * rows

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
    counts: Mapping[int, int], times: StepTimes, current: BucketTable, limit: int
) -> Suggestion:
    """Return the best set of at most `limit` buckets for steps counted by their real size.

    Best among the candidates of `times`. The largest of the current buckets stays: it is what the
    engine may be asked for. Raises `BucketError` when a size does not fit into it or `limit` is not
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
    wanted: Counter[int] = Counter()
    for size, count in seen.items():
        wanted[times.candidate(size)] += count
    sizes = sorted({*wanted, current.largest})
    best = BucketTable(_best_set(sizes, [wanted[size] for size in sizes], times, limit))
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


def _best_set(
    sizes: Sequence[int], counts: Sequence[int], times: StepTimes, limit: int
) -> tuple[int, ...]:
    """`sizes` ascending, the last one is always taken."""
    search = _Search(counts, [times.of(size) for size in sizes])
    for _ in range(1, min(limit, len(sizes))):
        search.one_more_bucket()
    return tuple(sizes[index] for index in search.best_path())


class _Search:
    """The cheapest sets of at most n buckets that end at each size, for n = 1, 2, ...

    Work is sizes times their logarithm for each n. A larger last bucket never wants a smaller one
    before it: seconds do not fall with the size, so that the cost fulfils the quadrangle
    inequality, and the best bucket before the middle size bounds those of either half.
    """

    def __init__(self, counts: Sequence[int], seconds: Sequence[float]) -> None:
        self._steps_up_to = [0, *accumulate(counts)]
        self._seconds = seconds
        # All steps up to sizes[end], with buckets of which the last is sizes[end].
        self._cost = [self._between(-1, end) for end in range(len(counts))]
        self._before: list[list[int | None]] = []

    def one_more_bucket(self) -> None:
        """Allow one bucket more."""
        cost = list(self._cost)
        before: list[int | None] = [None] * len(cost)
        self._improve(cost, before, (1, len(cost) - 1), (0, len(cost) - 2))
        self._cost = cost
        self._before.append(before)

    def best_path(self) -> list[int]:
        """Return the indices of the cheapest set that ends at the last size, ascending."""
        path = [len(self._cost) - 1]
        for before in reversed(self._before):
            found = before[path[-1]]
            if found is not None:
                path.append(found)
        return path[::-1]

    def _between(self, before: int, end: int) -> float:
        """Seconds of the steps larger than sizes[before] in the bucket sizes[end]."""
        steps = self._steps_up_to
        return (steps[end + 1] - steps[before + 1]) * self._seconds[end]

    def _improve(
        self,
        cost: list[float],
        before: list[int | None],
        ends: tuple[int, int],
        choices: tuple[int, int],
    ) -> None:
        """Fill in the sizes of `ends`, whose best buckets before lie among `choices`."""
        if ends[0] > ends[1]:
            return
        end = (ends[0] + ends[1]) // 2
        last = min(end - 1, choices[1])
        totals = ((self._cost[b] + self._between(b, end), b) for b in range(choices[0], last + 1))
        total, best = min(totals)
        # Fewer buckets win a tie: each is a graph to compile and to keep.
        if total < cost[end] and not math.isclose(total, cost[end], rel_tol=1e-12):
            cost[end], before[end] = total, best
        self._improve(cost, before, (ends[0], end - 1), (choices[0], best))
        self._improve(cost, before, (end + 1, ends[1]), (best, choices[1]))


def _cost(counts: Mapping[int, int], times: StepTimes, table: BucketTable) -> tuple[float, int]:
    """Return the seconds and the padded rows of all steps."""
    seconds, padded = 0.0, 0
    for size, count in counts.items():
        bucket = table.find(size)
        seconds += count * times.of(bucket, size)
        padded += count * (bucket - size)
    return seconds, padded
