"""Expected seconds of steps, also of sizes that have not run."""

from __future__ import annotations

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.verify import VerifyTable
from rbln_backend.speculation.step_costs import StepCosts


def table(*buckets: int) -> VerifyTable:
    return VerifyTable(BucketTable(buckets), [4], 64)


def test_sizes_below_all_that_ran_take_time() -> None:
    # A line through these falls below zero at one token.
    costs = StepCosts(table(3, 8), {(3, 1): 0.001, (3, 4): 0.008, (8, 1): 0.01, (8, 4): 0.04})
    smaller = costs.over(table(1, 8))
    assert smaller.seconds((1, 1)) > 0
    smaller.record((1, 1), 0.0005, 0.0006)
    assert 0 < smaller.seconds((1, 1)) < smaller.seconds((1, 4))
