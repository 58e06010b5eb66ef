"""The set of buckets that a mix of sizes would run fastest on, found exactly.

A step of n rows costs what a step of the next bucket costs, so that padding is paid in step time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.usage import PHASES, PhaseUsage, Usage
from rbln_backend.errors import BucketError

LIMITS = {"prefill": 6, "decode": 32}
"""Most graphs of a phase that are suggested unless asked otherwise: as many as by default."""


class StepTimes:
    """Seconds of a step by its bucket, from mean times measured on some buckets.

    Linear between measured buckets and beyond them, never less for a larger bucket. One measured
    bucket says nothing of smaller ones, which then cost the same. Without any measurement a step
    costs its rows, which makes padded rows the thing to save.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        self._sizes = sorted(measured)
        # A rarely used bucket may have measured too little time.
        self._seconds = list(accumulate((measured[size] for size in self._sizes), max))

    def of(self, bucket: int, rows: int = 0) -> float:  # noqa: ARG002
        """Return the seconds of a step of this bucket; how many `rows` it holds is not known."""
        return self._between(bucket)

    def candidate(self, size: int, price: float) -> int:  # noqa: ARG002
        """Return the bucket that would be made for steps of this size."""
        return size

    def _between(self, bucket: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return float(bucket)
        if len(sizes) == 1:
            return seconds[0] * max(bucket / sizes[0], 1.0)
        right = min(max(bisect_left(sizes, bucket), 1), len(sizes) - 1)
        span = sizes[right] - sizes[right - 1]
        slope = (seconds[right] - seconds[right - 1]) / span
        return max(seconds[right - 1] + slope * (bucket - sizes[right - 1]), 0.0)


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

    def candidate(self, size: int, price: float) -> int:
        """Return the fastest measured bucket that holds `size`; one at least has to.

        Each row of a bucket takes `price` seconds more than was measured.
        """
        first = bisect_left(self._sizes, size)
        found = zip(self._seconds[first:], self._sizes[first:], strict=True)
        return min((seconds + price * bucket, bucket) for seconds, bucket in found)[1]


@dataclass(frozen=True, slots=True)
class Change:
    """The present and the better buckets of a phase, and what its steps take in either."""

    current: BucketTable
    suggested: BucketTable
    now: PhaseUsage
    then: PhaseUsage

    def report(self) -> dict[str, Any]:
        """As JSON for people and programs."""
        return {
            "steps": self.now.steps,
            "current": list(self.current),
            "suggested": list(self.suggested),
            "padding_now": round(self.now.padding, 4),
            "padding_then": round(self.then.padding, 4),
        }


def saving(seconds_now: float, seconds_then: float) -> float:
    """Return the share of time that is saved, 0 where there was none."""
    return 1.0 - seconds_then / seconds_now if seconds_now > 0 else 0.0


def suggest(
    counts: Mapping[int, int],
    times: StepTimes,
    current: BucketTable,
    limit: int,
    slack: float = 0.0,
) -> Change:
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
    best = _cheapest_table(counts, times, current.largest, limit)
    if slack and any(counts.values()):
        best = _least_padded(counts, times, best, limit, slack)
    return Change(current, best, ran_in(current, counts, times), ran_in(best, counts, times))


def ran_in(table: BucketTable, counts: Mapping[int, int], times: StepTimes) -> PhaseUsage:
    """Return the steps of `counts`, by size, as they would run in the buckets of `table`."""
    usage = PhaseUsage()
    for size, steps in counts.items():
        bucket = table.find(size)
        usage.note(size, bucket, steps * times.of(bucket, size), steps)
    return usage


def advise(usage: Usage) -> dict[str, Any]:
    """Return by phase the present and the suggested sizes, and what the change would save.

    `saving` is a share of the steps' time, 0 to 1, predicted from mean step times; a phase of which
    nothing fitting is recorded is null.
    """
    return {phase: _advise(usage, phase) for phase in PHASES}


def fitting(counts: Mapping[int, int], table: BucketTable) -> dict[int, int]:
    """Return the steps by size without larger sizes, which another engine allowed."""
    return {size: steps for size, steps in counts.items() if size <= table.largest}


def _advise(usage: Usage, phase: str) -> dict[str, Any] | None:
    recorded, sizes = usage.phases[phase], usage.about.get(f"{phase}_buckets")
    if not sizes:
        return None
    table = BucketTable(tuple(sizes))
    counts = fitting(recorded.steps_by_size, table)
    if not counts:
        return None
    found = suggest(counts, StepTimes(recorded.mean_seconds()), table, LIMITS[phase])
    return {
        **found.report(),
        "saving": round(saving(found.now.seconds, found.then.seconds), 4),
        "setting": _SETTINGS[phase].format(sizes=list(found.suggested)),
    }


_SETTINGS = {
    "prefill": '--additional-config \'{{"rbln": {{"prefill_chunk_buckets": {sizes}}}}}\'',
    "decode": '--additional-config \'{{"rbln": {{"decode_batch_bucket_strategy": "manual", '
    '"decode_batch_bucket_manual_buckets": {sizes}}}}}\'',
}


def _cheapest_table(
    counts: Mapping[int, int], times: StepTimes, largest: int, limit: int, price: float = 0.0
) -> BucketTable:
    """The set of the least seconds if each row takes `price` more; `largest` is always taken."""
    wanted = Counter({largest: 0})
    for size, count in counts.items():
        if count:
            wanted[times.candidate(size, price)] += count
    sizes = sorted(wanted)
    seconds = [times.of(size) + price * size for size in sizes]
    path = _cheapest_path([wanted[size] for size in sizes], seconds, limit)
    return BucketTable(tuple(sizes[index] for index in path))


def _least_padded(
    counts: Mapping[int, int], times: StepTimes, best: BucketTable, limit: int, slack: float
) -> BucketTable:
    """A set of fewer padded rows than `best`, if one takes at most `slack` of its seconds more.

    The dearer a row, the fewer are padded and the longer all steps take: the highest price that
    the slack allows is looked for, from a 256th of what a row takes to its double.
    """
    least = ran_in(best, counts, times)
    allowed = least.seconds * (1.0 + slack)
    row = least.seconds / sum(size * count for size, count in counts.items())
    for power in range(-8, 2):
        table = _cheapest_table(counts, times, best.largest, limit, row * 2.0**power)
        other = ran_in(table, counts, times)
        if other.seconds <= allowed and other.padded < least.padded:
            best, least = table, other
    return best


def _cheapest_path(counts: Sequence[int], seconds: Sequence[float], limit: int) -> list[int]:
    """Return the indices of the sizes that are buckets, ascending; the last size is one.

    By dynamic programming: a bucket between two sizes would only pad the smaller one more. A larger
    last bucket never wants a smaller one before it: seconds do not fall with the size, so that the
    cost fulfils the quadrangle inequality, and the best bucket before the middle size bounds those
    of either half. So the work is sizes times their logarithm for each bucket of the limit.
    """
    up_to = [0, *accumulate(counts)]
    # All steps up to the size `end` with so many buckets, of which it is the last.
    cost = [up_to[end + 1] * seconds[end] for end in range(len(counts))]
    befores: list[dict[int, int]] = []
    for _ in range(1, min(limit, len(counts))):
        better, before = list(cost), {}
        halves = [(1, len(counts) - 1, 0, len(counts) - 2)]
        while halves:
            first, last, low, high = halves.pop()
            end = (first + last) // 2
            total, best = min(
                (cost[index] + (up_to[end + 1] - up_to[index + 1]) * seconds[end], index)
                for index in range(low, min(end - 1, high) + 1)
            )
            # Fewer buckets win a tie: each is a graph to compile and to keep.
            if total < cost[end] and not math.isclose(total, cost[end], rel_tol=1e-12):
                better[end], before[end] = total, best
            halves += [(first, end - 1, low, best)] if first < end else []
            halves += [(end + 1, last, best, high)] if end < last else []
        cost = better
        befores.append(before)
    path = [len(counts) - 1]
    for before in reversed(befores):
        path += [before[path[-1]]] if path[-1] in before else []
    return path[::-1]
