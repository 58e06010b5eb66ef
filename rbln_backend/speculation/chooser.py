"""Choice of the next step's tokens per request: the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rbln_backend.bucketing.verify import VerifyTable
from rbln_backend.speculation.step_costs import StepCosts

_LEAST_GAIN = 1.03
"""A smaller gain is within the error of step times: such drafts are not checked."""


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The size of the next decode step."""

    length: int = 1
    """Most tokens of a request; 1: no drafts are checked."""
    gain: float = 1.0
    """Expected tokens per second, relative to a step without drafts."""


class Chooser:
    """Compares the tokens expected of drafts with the seconds of a step that checks them."""

    def __init__(self, table: VerifyTable, costs: StepCosts) -> None:
        self._table, self._costs = table, costs

    def choose(
        self, expected: Sequence[Sequence[float]], requests: int, drafting_s: float = 0.0
    ) -> StepChoice:
        """Return the size of a step of ``requests`` requests, with and without drafts.

        ``expected``: the ``Acceptance.expect`` of each request with a draft. ``drafting_s``:
        seconds of computing the drafts of a step.
        """
        sizes = self._table.sizes(requests) if expected else ()
        best, least = StepChoice(), _LEAST_GAIN
        for size in sizes[1:]:
            drafts = size[1] - 1
            right = sum(tokens[min(drafts, len(tokens)) - 1] for tokens in expected)
            gain = (1 + right / requests) * self._costs.seconds(sizes[0])
            gain /= self._costs.seconds(size) + drafting_s
            if gain > least:
                best, least = StepChoice(size[1], gain), gain
        return best
