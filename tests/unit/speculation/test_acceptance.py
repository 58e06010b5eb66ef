"""The expected tokens of a draft follow the tokens sampled after similar drafts."""

from __future__ import annotations

import pytest

from rbln_backend.speculation.acceptance import Acceptance
from rbln_backend.speculation.drafter import Draft


def test_drafts_that_are_never_right_are_soon_not_expected() -> None:
    acceptance = Acceptance()
    for _ in range(30):
        acceptance.expect(Draft([1, 2, 3], 2))
        acceptance.record([9])
    assert acceptance.expect(Draft([1, 2, 3], 2))[-1] < 0.1


def test_drafts_that_are_always_right_are_expected_in_full() -> None:
    acceptance = Acceptance()
    for _ in range(30):
        acceptance.expect(Draft([1, 2, 3], 2))
        acceptance.record([1, 2, 3, 4])
    assert acceptance.expect(Draft([1, 2, 3], 2)) == pytest.approx([1, 2, 3], abs=0.2)


def test_a_sampled_token_counts_for_drafts_that_no_step_checked() -> None:
    acceptance = Acceptance()
    for match_length in (2, 3, 4) * 20:
        acceptance.expect(Draft([1, 2, 3], match_length))
        acceptance.record([1])
    assert acceptance.expect(Draft([1, 2, 3], 2))[-1] > 2.7


def test_rates_are_separate_by_match_length() -> None:
    acceptance = Acceptance()
    for _ in range(20):
        acceptance.expect(Draft([1], 2))
        acceptance.record([9])
        acceptance.expect(Draft([1], 12))
        acceptance.record([1])
    assert acceptance.expect(Draft([5], 2))[0] < 0.1
    assert acceptance.expect(Draft([5], 30))[0] > 0.9


def test_what_is_left_of_a_right_draft_is_compared_with_the_next_tokens() -> None:
    acceptance = Acceptance(is_computed=True)
    for _ in range(30):
        acceptance.expect(Draft([1, 2, 3], 0))
        assert [acceptance.record([token]) for token in (1, 2, 9, 1)] == [True, True, False, None]
    assert acceptance.expect(Draft([1, 2, 3], 0)) == pytest.approx([1, 2, 2], abs=0.3)


def test_only_the_latest_draft_is_counted_and_once() -> None:
    acceptance = Acceptance()
    before = acceptance.expect(Draft([1], 3))
    acceptance.expect(Draft([], 0))
    acceptance.record([9])
    acceptance.record([9])
    assert acceptance.expect(Draft([1], 3)) == before
