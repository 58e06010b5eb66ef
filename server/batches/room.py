"""How many lines of batches may run: the rows that nobody else would use.

A decode graph computes the rows of its bucket whatever is in them. While n requests of clients
run, the rows up to the bucket of n are padding; lines fill those and no more, beside the clients'
own requests of the tier flex. With nobody there they take the largest bucket.
"""

from __future__ import annotations

import bisect

from server.admission import Admission
from server.lifecycle import Lifecycle, Phase


class SpareRows:
    """Rows of the engine that are free for lines."""

    def __init__(self, lifecycle: Lifecycle, admission: Admission) -> None:
        self._lifecycle = lifecycle
        self._admission = admission

    def limit(self) -> int:
        """Return how many lines may run now; those that run already are parked by the engine."""
        if self._lifecycle.phase is not Phase.READY:
            return 0
        buckets, online = self._admission.rows, self._admission.in_flight
        place = bisect.bisect_left(buckets, online)
        if not online:
            return buckets[-1] - self._admission.flex_in_flight
        spare = buckets[place] - online if place < len(buckets) else 0
        return spare - self._admission.flex_in_flight
