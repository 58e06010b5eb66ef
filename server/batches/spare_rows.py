"""How many lines of batches may run: the rows that nobody else would use.

A decode graph computes the rows of its bucket whatever is in them. While n requests of clients
run, the rows up to the bucket of n are padding; lines fill those and no more, beside the clients'
own requests of the tier flex. With nobody there they take the bucket that makes the most tokens/s.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from server.admission import Admission
from server.lifecycle import Lifecycle, ServicePhase

DecodeTimes = Mapping[int, tuple[int, float]]
"""Decode steps that ran, and the seconds that they took together, by bucket."""
_LEAST_STEPS = 200
_LEAST_GAIN = 1.1
"""What a smaller bucket must make of the largest one's tokens/s: steps differ by as much."""


def best_rows(buckets: Sequence[int], times: DecodeTimes) -> int:
    """Return the bucket that makes the most tokens/s: the largest, unless others are measured."""
    largest = buckets[-1]
    rates = {
        bucket: bucket * steps / seconds
        for bucket, (steps, seconds) in times.items()
        if bucket in buckets and steps >= _LEAST_STEPS and seconds > 0
    }
    best = max(rates, key=rates.__getitem__, default=largest)
    if largest not in rates or rates[best] < rates[largest] * _LEAST_GAIN:
        return largest
    return best


class SpareRows:
    """Rows of the engine that are free for lines."""

    def __init__(self, lifecycle: Lifecycle, admission: Admission) -> None:
        self._lifecycle = lifecycle
        self._admission = admission
        self._times: DecodeTimes = {}

    def learn(self, times: DecodeTimes) -> None:
        """Take note of how long steps have taken so far."""
        self._times = times

    def limit(self) -> int:
        """Return how many lines may run now; those that run already are parked by the engine."""
        if self._lifecycle.phase is not ServicePhase.READY:
            return 0
        buckets, online = self._admission.rows, self._admission.in_flight
        place = bisect.bisect_left(buckets, online)
        if not online:
            return best_rows(buckets, self._times) - self._admission.flex_in_flight
        spare = buckets[place] - online if place < len(buckets) else 0
        return spare - self._admission.flex_in_flight
