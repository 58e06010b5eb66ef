"""How many tokens of each request the next step takes: as many as promise the most a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rbln_backend.bucketing.verify import VerifyTable
from rbln_backend.speculation.step_costs import StepCosts

_LEAST_GAIN = 1.03
"""Less is within what step times are known to, and checks no drafts."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The size of the next step; 1: it checks no drafts."""

    length: int = 1
    """Tokens of each request at most."""
    gain: float = 1.0
    """How many times as many tokens a second are expected as without drafts."""


class Chooser:
    """Weighs what drafts are expected to give against what a step that checks them costs."""

    def __init__(self, table: VerifyTable, costs: StepCosts) -> None:
        self._table, self._costs = table, costs

    def choose(self, expected: Sequence[Sequence[float]], requests: int) -> Choice:
        """``expected``: for each request with a draft, its ``Acceptance.guess``.

        ``requests`` are in the step, with those that have none.
        """
        sizes = self._table.sizes(requests) if expected else ()
        best, least = Choice(), _LEAST_GAIN
        for size in sizes[1:]:
            drafts = size[1] - 1
            right = sum(guess[min(drafts, len(guess)) - 1] for guess in expected)
            gain = (1 + right / requests) * self._costs.of(sizes[0]) / self._costs.of(size)
            if gain > least:
                best, least = Choice(size[1], gain), gain
        return best
