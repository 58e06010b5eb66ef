"""The chosen size has the most expected tokens per second, by the measured seconds of steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.verify import VerifyTable
from rbln_backend.speculation.chooser import Chooser, StepChoice
from rbln_backend.speculation.step_costs import StepCosts

TABLE = VerifyTable(BucketTable((1, 4)), (2, 4, 8), 16)
MEASURED = {(1, 1): 10.0, (1, 2): 11.0, (1, 4): 13.0, (1, 8): 20.0, (4, 1): 13.0, (4, 2): 20.0}
SURE = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def chooser(measured: dict[tuple[int, int], float] = MEASURED) -> Chooser:
    return Chooser(TABLE, StepCosts(TABLE, measured))


def test_certain_drafts_are_checked_in_full() -> None:
    assert chooser().choose([SURE], 1) == StepChoice(8, pytest.approx(4.0))


@pytest.mark.parametrize(
    ("expected", "length"),
    [([], 1), ([[0.0]], 1), ([[0.1]], 1), ([[0.2]], 2), ([[0.5, 0.8, 1.0]], 4), ([[0.9, 0.9]], 2)],
)
def test_drafts_with_less_gain_than_cost_are_not_checked(
    expected: list[list[float]], length: int
) -> None:
    assert chooser().choose(expected, 1).length == length


def test_requests_without_drafts_count_in_the_cost_of_a_step() -> None:
    # 4x4 was not measured: sixteen tokens cost as 4x2 and 1x8 rise.
    assert chooser().choose([SURE], 1).length == 8
    assert chooser().choose([SURE], 4).length == 1
    assert chooser().choose([SURE] * 3, 4).length > 1


def test_sizes_that_are_not_compiled_are_not_chosen() -> None:
    assert chooser({(1, 1): 1.0}).choose([SURE] * 5, 5) == StepChoice()


RUNS = st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.floats(0.5, 2.0)), max_size=60)


@given(RUNS)
def test_the_choice_is_the_best_by_the_measured_costs(runs: list[tuple[int, float]]) -> None:
    costs = StepCosts(TABLE, MEASURED)
    for length, slower in runs:
        seconds = MEASURED[1, length] * slower
        costs.record((1, length), seconds, seconds * 1.1)
    choice = Chooser(TABLE, costs).choose([SURE], 1)
    rates = {n: n / costs.seconds((1, n)) for n in (1, 2, 4, 8)}
    assert rates[choice.length] * 1.04 >= max(rates.values())
    assert all(costs.seconds((1, n)) > 0 for n in rates)


def test_costs_follow_the_steps() -> None:
    costs = StepCosts(TABLE, MEASURED)
    for _ in range(30):
        costs.record((1, 8), 40.0, 41.0)
    assert costs.seconds((1, 8)) == pytest.approx(41.0, rel=0.02)
    # Of those that never ran, what warm-up took, in proportion.
    assert costs.seconds((1, 1)) == pytest.approx(21.0, rel=0.02)


def test_one_slow_step_has_a_bounded_and_decaying_effect() -> None:
    costs = StepCosts(TABLE, MEASURED)
    for _ in range(10):
        costs.record((1, 8), 20.0, 20.0)
    costs.record((1, 8), 500.0, 500.0)
    assert costs.seconds((1, 8)) < 25.0
    slow = StepCosts(TABLE, MEASURED)
    for _ in range(10):
        slow.record((1, 8), 60.0, 60.0)
    for _ in range(200):
        slow.record((1, 1), 10.0, 10.0)
    assert slow.seconds((1, 8)) == pytest.approx(20.0, rel=0.1)


def test_without_measurements_all_sizes_cost_the_same() -> None:
    costs = StepCosts(TABLE, {})
    assert costs.seconds((1, 1)) == costs.seconds((4, 4))
