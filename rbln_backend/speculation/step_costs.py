"""Seconds of decode steps by size: measured at warm-up, updated after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rbln_backend.bucketing.step_times import StepTimes
from rbln_backend.bucketing.verify import Size, VerifyTable

_WINDOW = 8
"""Steps of a size that its time is a running mean of."""
_DECAY_STEPS = 64
"""Steps after which the time of a size that ran slowly has decayed to what others suggest."""
_OUTLIER = 2.0
"""Times the mean: a slower run counts as this much, because something interrupted it."""


class StepCosts:
    """Seconds by size: requests, and tokens of each.

    A graph's time is the mean of its latest runs. A size that has not run yet has its warm-up time,
    scaled as the other sizes of its bucket have slowed down since: contexts have grown. It is never
    above that of a larger size that ran, as a run that something interrupted would be: drafts would
    then seem to pay, and steps without them, which correct it, would not run. The time of a step
    outside its graph (sampling, the host) is the same for all sizes.
    """

    def __init__(self, table: VerifyTable, measured: Mapping[Size, float]) -> None:
        """``measured``: seconds of some sizes; those of others are interpolated by tokens."""
        like = StepTimes({bucket * length: taken for (bucket, length), taken in measured.items()})
        self._sizes = {bucket: table.sizes(bucket) for bucket in table.buckets}
        self._at_warm_up = {
            size: measured.get(size, like.of(size[0] * size[1]) if measured else 1.0)
            for sizes in self._sizes.values()
            for size in sizes
        }
        self._graph = dict(self._at_warm_up)
        self._overhead = 0.0
        self._runs = Counter[Size]()

    def seconds(self, size: Size) -> float:
        """Return the expected seconds of a step."""
        return self._graph[size] + self._overhead

    def record(self, size: Size, graph_s: float, step_s: float) -> None:
        """Update with a step that took ``step_s`` seconds, ``graph_s`` of them in its graph."""
        self._overhead += (min(step_s - graph_s, graph_s) - self._overhead) / _WINDOW
        mean, runs = self._graph[size], min(self._runs[size] + 1, _WINDOW)
        self._runs[size] = runs
        if runs == _WINDOW:
            graph_s = min(graph_s, _OUTLIER * mean)
        self._graph[size] = mean + (graph_s - mean) / runs
        for other in self._sizes[size[0]]:
            if other != size:
                self._adjust(other, self._graph[size] / self._at_warm_up[size])
            if other < size:
                self._graph[other] = min(self._graph[other], self._graph[size])

    def _adjust(self, size: Size, slowdown: float) -> None:
        expected = self._at_warm_up[size] * slowdown
        if not self._runs[size]:
            self._graph[size] = expected
        elif expected < self._graph[size]:
            self._graph[size] += (expected - self._graph[size]) / _DECAY_STEPS
