"""What is expected of a draft follows what came where drafts like it were guessed."""

from __future__ import annotations

import pytest

from rbln_backend.speculation.acceptance import Acceptance
from rbln_backend.speculation.drafter import Draft


def test_what_never_comes_true_is_soon_not_expected() -> None:
    acceptance = Acceptance()
    for _ in range(30):
        acceptance.guess(Draft([1, 2, 3], 2))
        acceptance.note([9])
    assert acceptance.guess(Draft([1, 2, 3], 2))[-1] < 0.1


def test_what_always_comes_true_is_expected_in_full() -> None:
    acceptance = Acceptance()
    for _ in range(30):
        acceptance.guess(Draft([1, 2, 3], 2))
        acceptance.note([1, 2, 3, 4])
    assert acceptance.guess(Draft([1, 2, 3], 2)) == pytest.approx([1, 2, 3], abs=0.2)


def test_a_token_shows_what_drafts_that_nobody_checked_were_worth() -> None:
    acceptance = Acceptance()
    for agreed in (2, 3, 4) * 20:
        acceptance.guess(Draft([1, 2, 3], agreed))
        acceptance.note([1])
    assert acceptance.guess(Draft([1, 2, 3], 2))[-1] > 2.7


def test_drafts_are_judged_by_what_speaks_for_them() -> None:
    acceptance = Acceptance()
    for _ in range(20):
        acceptance.guess(Draft([1], 2))
        acceptance.note([9])
        acceptance.guess(Draft([1], 12))
        acceptance.note([1])
    assert acceptance.guess(Draft([5], 2))[0] < 0.1
    assert acceptance.guess(Draft([5], 30))[0] > 0.9


def test_only_what_was_guessed_last_is_judged_and_once() -> None:
    acceptance = Acceptance()
    before = acceptance.guess(Draft([1], 3))
    acceptance.guess(Draft([], 0))
    acceptance.note([9])
    acceptance.note([9])
    assert acceptance.guess(Draft([1], 3)) == before
