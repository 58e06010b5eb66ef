"""The exact search for the cheapest buckets, by dynamic programming over the sizes that occurred.

A bucket between two of these sizes would only pad the smaller one more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate


class BucketSearch:
    """The cheapest sets of at most n buckets that end at each size, for n = 1, 2, ...

    Work is sizes times their logarithm for each n. A larger last bucket never wants a smaller one
    before it: seconds do not fall with the size, so that the cost fulfils the quadrangle
    inequality, and the best bucket before the middle size bounds those of either half.
    """

    def __init__(self, counts: Sequence[int], seconds: Sequence[float]) -> None:
        """Begin with one bucket; `counts` and `seconds` are those of the sizes, ascending."""
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
