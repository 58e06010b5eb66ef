"""What decode steps cost by their size: measured at warm-up, and again by every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rbln_backend.bucketing.tuner import StepTimes
from rbln_backend.bucketing.verify import Size, VerifyTable

_LATELY = 8
"""Steps of a size that its time is a mean of."""
_PATIENCE = 64
"""Steps after which a size that ran slowly once may be tried again."""
_OUTLIER = 2.0
"""Times the usual: more says what interrupted a step, and nothing of the next."""


class StepCosts:
    """Seconds by size: requests and tokens of each.

    A graph's time is the mean of its latest runs. One that has not run yet takes what it took at
    warm-up, times what others of its bucket take more by now: their requests have come to have
    longer contexts. What a step takes beside its graph (sampling, the host) is the same for all.
    """

    def __init__(self, table: VerifyTable, measured: Mapping[Size, float]) -> None:
        """``measured``: by size, as many as there was time for; others lie between by tokens."""
        like = StepTimes({bucket * length: taken for (bucket, length), taken in measured.items()})
        self._sizes = {bucket: table.sizes(bucket) for bucket in table.buckets}
        self._at_first = {
            size: measured.get(size, like.of(size[0] * size[1]) if measured else 1.0)
            for sizes in self._sizes.values()
            for size in sizes
        }
        self._graph = dict(self._at_first)
        self._beside = 0.0
        self._ran = Counter[Size]()

    def of(self, size: Size) -> float:
        """Seconds of a step."""
        return self._graph[size] + self._beside

    def note(self, size: Size, graph_s: float, step_s: float) -> None:
        """A step took ``step_s``, of which its graph took ``graph_s``."""
        self._beside += (min(step_s - graph_s, graph_s) - self._beside) / _LATELY
        usual, ran = self._graph[size], min(self._ran[size] + 1, _LATELY)
        self._ran[size] = ran
        if ran == _LATELY:
            graph_s = min(graph_s, _OUTLIER * usual)
        self._graph[size] = usual + (graph_s - usual) / ran
        for other in self._sizes[size[0]]:
            if other != size:
                self._follow(other, self._graph[size] / self._at_first[size])

    def _follow(self, other: Size, slower: float) -> None:
        expected = self._at_first[other] * slower
        if not self._ran[other]:
            self._graph[other] = expected
        elif expected < self._graph[other]:
            self._graph[other] += (expected - self._graph[other]) / _PATIENCE
