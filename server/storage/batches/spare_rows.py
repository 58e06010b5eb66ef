"""Number of batch lines that may run in rows of the decode bucket that clients leave free.

A decode graph computes all rows of its bucket. While n client requests run, the rows between n and
the bucket size are padding; lines and client requests of the tier flex share them. Without client
requests, lines fill the bucket with the most tokens/s.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from server.admission import Admission
from server.lifecycle import Lifecycle, ServicePhase

DecodeTimes = Mapping[int, tuple[int, float]]
"""Number of decode steps and their total seconds, by bucket."""
_LEAST_STEPS = 200
_LEAST_GAIN = 1.1
"""Tokens/s that a smaller bucket needs, relative to the largest; step times vary as much."""


def best_rows(buckets: Sequence[int], times: DecodeTimes) -> int:
    """Return the bucket with the most tokens/s; the largest one until measurements exist."""
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
    """Spare rows of the engine for batch lines."""

    def __init__(self, lifecycle: Lifecycle, admission: Admission) -> None:
        self._lifecycle = lifecycle
        self._admission = admission
        self._times: DecodeTimes = {}

    def set_decode_times(self, times: DecodeTimes) -> None:
        """Replace the measured step times."""
        self._times = times

    def limit(self) -> int:
        """Return how many lines may run. The engine parks running lines beyond that."""
        if self._lifecycle.phase is not ServicePhase.READY:
            return 0
        buckets, online = self._admission.rows, self._admission.in_flight
        place = bisect.bisect_left(buckets, online)
        if not online:
            return best_rows(buckets, self._times) - self._admission.flex_in_flight
        spare = buckets[place] - online if place < len(buckets) else 0
        return spare - self._admission.flex_in_flight
