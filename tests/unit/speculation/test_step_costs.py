"""Expected seconds of steps, also of sizes that have not run."""

from __future__ import annotations

import pytest

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.verify import VerifyTable
from rbln_backend.speculation.step_costs import StepCosts


def table(*buckets: int) -> VerifyTable:
    return VerifyTable(BucketTable(buckets), [4], 64)


def test_sizes_below_all_that_ran_take_time() -> None:
    # A line through these falls below zero at one token.
    measured = {(3, 1): 0.001, (3, 4): 0.008, (8, 1): 0.01, (8, 4): 0.04}
    smaller = StepCosts(table(1, 8), measured)
    assert smaller.seconds((1, 1)) > 0
    smaller.record((1, 1), 0.0005, 0.0006)
    assert 0 < smaller.seconds((1, 1)) < smaller.seconds((1, 4))


def test_an_interrupted_step_without_drafts_costs_no_more_than_one_with_them() -> None:
    costs = StepCosts(table(1), {(1, 1): 0.01, (1, 4): 0.02})
    costs.record((1, 1), 0.06, 0.06)
    costs.record((1, 4), 0.02, 0.02)
    assert costs.seconds((1, 1)) == pytest.approx(0.02)
    costs.record((1, 1), 0.01, 0.01)
    assert costs.seconds((1, 1)) == pytest.approx(0.015)


def test_a_warm_up_that_was_interrupted_is_forgotten_with_the_first_drafts() -> None:
    costs = StepCosts(table(1), {(1, 1): 0.06, (1, 4): 0.02})
    costs.record((1, 4), 0.02, 0.02)
    assert costs.seconds((1, 1)) == costs.seconds((1, 4))
