"""Checks of drafts that do not pay cost little, and those that pay go on."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from rbln_backend.speculation.drafter import (
    FIRST,
    LARGEST_LOSS,
    LEAST_PLAIN,
    MOST_CHECKS,
    SHARE,
    DraftBudget,
)

DRAFTS = 3
PLAIN_S = 0.05
LONGEST_PAUSE = round(LARGEST_LOSS / SHARE)

CHECKS = st.lists(
    st.tuples(st.floats(1.0, DRAFTS + 1.0), st.floats(0.5, 1 + LARGEST_LOSS)), max_size=60
)
"""Tokens of each request that a check brings, and its time in plain steps."""


def steps(budget: DraftBudget, checks: Iterator[tuple[float, float]]) -> Iterator[tuple[bool, ...]]:
    """Run a step each, plain or the next check; yield whether it was one, until none is left."""
    while True:
        if budget.drafts(1):
            check = next(checks, None)
            if check is None:
                return
            tokens, cost = check
            gain = budget.checked(1, cost * PLAIN_S, tokens)
            assert abs(gain - tokens / cost) < 1e-9
            yield True, tokens, cost
        else:
            budget.plain(1, PLAIN_S)
            yield False, 1.0, 1.0


def new() -> DraftBudget:
    return DraftBudget(DRAFTS, lambda own: own)


@given(CHECKS)
def test_never_more_than_a_small_share_of_the_time_is_lost(
    checks: list[tuple[float, float]],
) -> None:
    plain = lost = 0.0
    for is_check, tokens, cost in steps(new(), iter(checks)):
        lost += cost - tokens
        plain += not is_check
        # The pause after the latest check makes up for it.
        assert lost <= FIRST + SHARE * plain + LARGEST_LOSS + 1e-9


@given(CHECKS)
def test_drafts_that_pay_are_found_after_any_others(checks: list[tuple[float, float]]) -> None:
    budget = new()
    for _ in steps(budget, iter(checks)):
        pass
    waited = 0
    while not budget.drafts(1):
        budget.plain(1, PLAIN_S)
        waited += 1
    assert waited <= LONGEST_PAUSE
    right = [(4.0, 1.5)] * 500
    kinds = [is_check for is_check, *_ in steps(budget, iter(right))]
    assert kinds.count(False) <= 500 // MOST_CHECKS + 1


def test_drafts_that_never_pay_are_checked_ever_less() -> None:
    wrong = iter([(1.0, 1.5)] * 1000)
    ran = [next(run) for run in [steps(new(), wrong)] for _ in range(2000)]
    time = sum(cost for *_, cost in ran)
    assert time / sum(tokens for _, tokens, _ in ran) < 1.03
    assert sum(is_check for is_check, *_ in ran[-500:]) >= 10


def test_a_bucket_begins_with_plain_steps_of_its_own() -> None:
    budget = new()
    for _ in range(LEAST_PLAIN):
        assert (budget.drafts(1), budget.drafts(4)) == (0, 0)
        assert budget.checked(1, 1.0, 4.0) == 1.0
        budget.plain(1, PLAIN_S)
    assert (budget.drafts(1), budget.drafts(4)) == (DRAFTS, 0)
    # What 4 requests lose stops no drafts of one.
    for _ in range(LEAST_PLAIN):
        budget.plain(4, PLAIN_S)
    for _ in range(2):
        budget.checked(4, 9 * PLAIN_S, 1.0)
    assert (budget.drafts(1), budget.drafts(4)) == (DRAFTS, 0)


def test_plain_steps_in_between_show_that_they_have_become_faster() -> None:
    budget, checks, now = new(), 0, 4 * PLAIN_S
    for _ in range(LEAST_PLAIN):
        budget.plain(1, 4 * PLAIN_S)
    # Contexts are short from now on: a check gains against the known time, and loses in truth.
    now = PLAIN_S
    for _ in range(6 * MOST_CHECKS):
        if budget.drafts(1):
            checks += 1
            budget.checked(1, 2 * now, 1.0)
        else:
            budget.plain(1, now)
    assert checks < 4 * MOST_CHECKS


def test_another_rank_decides_by_its_times() -> None:
    other = iter([7, 0])
    budget = DraftBudget(DRAFTS, lambda _: next(other))
    for _ in range(LEAST_PLAIN):
        budget.plain(1, PLAIN_S)
    budget.checked(1, PLAIN_S, 4.0)
    for _ in range(7):
        assert budget.is_paused(1) and not budget.drafts(1)
        budget.plain(1, PLAIN_S)
    # This rank alone would pause.
    budget.checked(1, 3 * PLAIN_S, 1.0)
    assert budget.drafts(1) == DRAFTS


def test_a_rank_that_does_not_decide_never_tells_a_longer_pause() -> None:
    """Its own checks may lose on and on; the pause is sent in a byte."""
    given: list[int] = []

    def decide(pause: int) -> int:
        given.append(pause)
        return 0

    budget = DraftBudget(DRAFTS, decide)
    for _ in range(LEAST_PLAIN):
        budget.plain(1, PLAIN_S)
    for _ in range(50):
        budget.checked(1, 4 * PLAIN_S, 1.0)
    assert max(given) == LONGEST_PAUSE < 256
