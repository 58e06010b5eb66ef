"""Drafts that are wrong soon cost nothing; drafts that are right are asked for in full."""

from __future__ import annotations

from rbln_backend.speculation.trust import LONGEST_PAUSE, Trust


def test_what_is_always_wrong_is_hardly_checked() -> None:
    trust, checked = Trust(7), 0
    for _ in range(1000):
        drafted = trust.limit()
        checked += drafted
        trust.judge(drafted, 0)
    assert checked <= 7 + 6 + 1000 // LONGEST_PAUSE


def test_what_is_always_right_is_checked_in_full() -> None:
    trust = Trust(7)
    for _ in range(20):
        assert trust.limit() == 7
        trust.judge(7, 7)


def test_a_right_draft_ends_the_pauses() -> None:
    trust = Trust(7)
    for _ in range(200):
        trust.judge(trust.limit(), 0)
    while not trust.limit():
        trust.judge(0, 0)
    limits = []
    for _ in range(5):
        limits.append(trust.limit())
        trust.judge(trust.limit(), trust.limit())
    assert limits == [1, 2, 4, 7, 7]


def test_lengths_follow_what_was_right() -> None:
    trust = Trust(7)
    trust.judge(7, 2)
    assert trust.limit() == 3
