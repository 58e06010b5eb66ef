"""Exact search for the set of buckets with the least step time for recorded sizes.

A step of n rows takes the time of a step of the next larger bucket.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rbln_backend.bucketing.buckets import BucketTable
from rbln_backend.bucketing.usage import PHASES, PhaseUsage, Usage
from rbln_backend.errors import BucketError


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


LIMITS = {"prefill": 6, "decode": 32}
"""Default limit of suggested graphs by phase."""
NOISE = 0.05
"""Share by which recorded step times of a bucket vary from day to day (docs/tuning.md)."""
LEAST_STEPS = 12
"""Steps that a bucket needs for its mean time to count."""


@dataclass(frozen=True, slots=True)
class Change:
    """Current and suggested buckets of a phase, with the usage under each."""

    current: BucketTable
    suggested: BucketTable
    now: PhaseUsage
    then: PhaseUsage

    @property
    def saving(self) -> float:
        """Share of step time saved; 0 without steps."""
        return 1.0 - self.then.seconds / self.now.seconds if self.now.seconds > 0 else 0.0

    def report(self) -> dict[str, Any]:
        """Return the change as JSON values."""
        return {
            "steps": self.now.steps,
            "current": list(self.current),
            "suggested": list(self.suggested),
            "padding_now": round(self.now.padding, 4),
            "padding_then": round(self.then.padding, 4),
        }


def suggest(
    counts: Mapping[int, int], times: StepTimes, current: BucketTable, limit: int
) -> Change:
    """Return the set of at most `limit` buckets with the least seconds for steps counted by size.

    The largest current bucket always stays; others stay within the limit if steps would use them
    at no cost. Raises `BucketError` when a size does not fit or `limit` is not positive.
    """
    if limit < 1:
        raise BucketError(f"The number of buckets must be greater than 0, got {limit}")
    if counts and not 1 <= min(counts) <= max(counts) <= current.largest:
        raise BucketError(
            f"Recorded sizes {min(counts)} to {max(counts)} do not fit into buckets up to "
            f"{current.largest}"
        )
    cheapest = _cheapest(counts, times, current.largest, limit)
    best = _with_used(cheapest, counts, times, current, limit)
    return Change(current, best, ran_in(current, counts, times), ran_in(best, counts, times))


def ran_in(table: BucketTable, counts: Mapping[int, int], times: StepTimes) -> PhaseUsage:
    """Return the usage of the steps in `counts`, by size, in the buckets of `table`."""
    usage = PhaseUsage()
    for size, steps in counts.items():
        bucket = table.find(size)
        usage.note(size, bucket, steps * times.of(bucket), steps)
    return usage


def advise(usage: Usage) -> dict[str, Any]:
    """Return the current and the suggested sizes by phase, and the predicted saving.

    `saving` is a share of the step time, 0 to 1, predicted from mean step times. If it is less than
    `noise`, the current sizes are suggested: `NOISE`, or the relative error of the predicted
    current time if larger. A phase without fitting records is null.
    """
    return {phase: _advise(usage, phase) for phase in PHASES}


def fitting(counts: Mapping[int, int], table: BucketTable) -> dict[int, int]:
    """Return the steps by size without sizes that are too large for `table`."""
    return {size: steps for size, steps in counts.items() if size <= table.largest}


def _advise(usage: Usage, phase: str) -> dict[str, Any] | None:
    recorded, sizes = usage.phases[phase], usage.about.get(f"{phase}_buckets")
    counts = fitting(recorded.steps_by_size, BucketTable(tuple(sizes))) if sizes else {}
    if not sizes or not counts:
        return None
    table, times = BucketTable(tuple(sizes)), StepTimes(recorded.mean_seconds(LEAST_STEPS))
    found = suggest(counts, times, table, max(LIMITS[phase], len(table)))
    modelled = sum(times.of(b) * steps for b, steps in recorded.steps_by_bucket.items())
    noise = max(NOISE, abs(modelled - recorded.seconds) / recorded.seconds)
    if found.saving < noise:
        found = Change(table, table, found.now, found.now)
    return {
        **found.report(),
        "saving": round(found.saving, 4),
        "noise": round(noise, 4),
        "setting": _SETTINGS[phase].format(sizes=list(found.suggested)),
    }


_SETTINGS = {
    "prefill": '--additional-config \'{{"rbln": {{"prefill_chunk_buckets": {sizes}}}}}\'',
    "decode": '--additional-config \'{{"rbln": {{"decode_batch_bucket_strategy": "manual", '
    '"decode_batch_bucket_manual_buckets": {sizes}}}}}\'',
}


def _with_used(
    best: BucketTable,
    counts: Mapping[int, int],
    times: StepTimes,
    current: BucketTable,
    limit: int,
) -> BucketTable:
    """Add current buckets that steps would use, within the limit; a smaller bucket costs nothing.

    Each change of sizes compiles graphs, so it should be small.
    """
    for bucket in current:
        more = BucketTable(tuple(sorted({*best, bucket})))
        if len(more) <= limit and bucket in ran_in(more, counts, times).steps_by_bucket:
            best = more
    return best


def _cheapest(counts: Mapping[int, int], times: StepTimes, largest: int, limit: int) -> BucketTable:
    """Return the set with the least seconds; it has `largest`."""
    costs = {size: times.of(size) for size in {*counts, largest}}
    # Drop buckets that take as long as a larger one, so that seconds rise with the size.
    useful = [largest]
    for size in sorted((size for size in costs if size < largest), reverse=True):
        useful += [size] if costs[size] < costs[useful[-1]] else []
    useful.reverse()
    wanted = Counter[int]()
    for size, count in counts.items():
        wanted[useful[bisect_left(useful, size)]] += count
    path = _cheapest_path(
        [wanted[size] for size in useful], [costs[size] for size in useful], limit
    )
    return BucketTable(tuple(useful[index] for index in path))


def _cheapest_path(counts: Sequence[int], seconds: Sequence[float], limit: int) -> list[int]:
    """Return the indices of the sizes that are buckets, ascending; the last size is one.

    Dynamic programming over the number of buckets, with divide and conquer: seconds rise with the
    size, so the cost fulfils the quadrangle inequality, and the best bucket before the middle size
    bounds those of either half. Takes O(limit * n log n) for n sizes.
    """
    up_to = [0, *accumulate(counts)]
    # By size: the least cost of the steps up to it with it as the last bucket, and the path.
    found = [(up_to[end + 1] * seconds[end], [end]) for end in range(len(counts))]
    for _ in range(1, min(limit, len(counts))):
        better = list(found)
        halves = [(1, len(counts) - 1, 0, len(counts) - 2)]
        while halves:
            first, last, low, high = halves.pop()
            end = (first + last) // 2
            total, best = min(
                (found[index][0] + (up_to[end + 1] - up_to[index + 1]) * seconds[end], index)
                for index in range(low, min(end - 1, high) + 1)
            )
            # Fewer buckets win a tie: each is a graph to compile and to store.
            if total < found[end][0] and not math.isclose(total, found[end][0]):
                better[end] = total, [*found[best][1], end]
            halves += [(first, end - 1, low, best)] if first < end else []
            halves += [(end + 1, last, best, high)] if end < last else []
        found = better
    return found[-1][1]
