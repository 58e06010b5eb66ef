"""Runs of a draft model are ever fewer while its drafts do not pay."""

from __future__ import annotations

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.speculation.draft_pace import DraftPace
from rbln_backend.speculation.drafting_costs import DraftingCosts


def steps_to_run(pace: DraftPace) -> int:
    steps = 1
    while not pace.is_due():
        steps += 1
    return steps


def test_pauses_grow_to_a_limit() -> None:
    pace, pauses = DraftPace(), list[int]()
    for _ in range(8):
        pauses.append(steps_to_run(pace))
        pace.record(False)
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 64]


def test_a_few_gains_do_not_end_long_pauses() -> None:
    pace = DraftPace()
    for _ in range(7):
        pace.record(False)
    pace.record(True)
    assert steps_to_run(pace) == 1
    pace.record(False)
    assert steps_to_run(pace) == 64
    for _ in range(7):
        pace.record(True)
        assert steps_to_run(pace) == 1
    pace.record(False)
    assert steps_to_run(pace) == 2


def test_right_drafts_are_followed_by_others_sooner() -> None:
    pace = DraftPace()
    for _ in range(7):
        pace.record(False)
    pace.hurry()
    assert steps_to_run(pace) == 8
    pace.record(False)
    assert steps_to_run(pace) == 64


def test_costs_follow_the_runs() -> None:
    costs = DraftingCosts(BucketTable((1, 4, 8)), {1: 1.0, 4: 2.5})
    assert costs.seconds(2) == costs.seconds(4) == 2.5
    assert costs.seconds(8) == costs.seconds(9) > 2.5
    costs.record(3, 100.0)
    assert 2.5 < costs.seconds(4) < 3.0
    for _ in range(60):
        costs.record(4, 5.0)
    assert abs(costs.seconds(4) - 5.0) < 0.1


def test_without_a_warm_up_the_first_run_counts() -> None:
    costs = DraftingCosts(BucketTable((1, 4)), {})
    assert costs.seconds(1) == 0
    costs.record(1, 2.0)
    assert costs.seconds(1) == 2.0
