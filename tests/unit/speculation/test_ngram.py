"""n-grams of the request's own text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbln_backend.speculation.drafter import DraftedRequest
from rbln_backend.speculation.text_drafts import NgramDrafter, NgramLimits
from tests.unit.speculation.texts import saved

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def proposed(tokens: list[int], limit: int, smallest: int = 2, largest: int = 4) -> list[int]:
    drafter = NgramDrafter(NgramLimits(smallest, largest))
    drafter.begin(DraftedRequest("a", tokens))
    return drafter.propose("a", limit)


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        # The longer one wins over the later one, and of the same length the later.
        ([9, 1, 2, 7, 7, 7, 7, 8, 1, 2, 6, 6, 6, 9, 1, 2], [7, 7, 7, 7]),
        ([8, 1, 2, 7, 7, 7, 7, 5, 1, 2, 6, 6, 6, 4, 1, 2], [6, 6, 6, 4]),
        # What repeats itself goes on doing so.
        ([5, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([5, 1, 2, 3, 1], []),
        ([1], []),
        ([], []),
    ],
)
def test_the_latest_of_the_longest_matches_is_continued(
    tokens: list[int], draft: list[int]
) -> None:
    assert proposed(tokens, 4) == draft


@given(TOKENS, st.integers(1, 5))
def test_the_draft_equals_that_of_a_linear_search(tokens: list[int], limit: int) -> None:
    for length in (3, 2):
        tail = tokens[-length:]
        ends = [e for e in range(length, len(tokens)) if tokens[e - length : e] == tail]
        if ends and len(tail) == length:
            expected = (tokens[ends[-1] :] * limit)[:limit]
            break
    else:
        expected = []
    # Few enough tokens that no more than the places which are compared can be missed.
    if len(tokens) <= 18:
        assert proposed(tokens, limit, 2, 3) == expected


@given(TOKENS, TOKENS, st.lists(st.integers(0, 5), max_size=20))
def test_tokens_come_in_any_portions(
    prompt: list[int], answer: list[int], portions: list[int]
) -> None:
    drafter = NgramDrafter(NgramLimits(2, 4))
    drafter.begin(DraftedRequest("a", prompt))
    rest = list(answer)
    for portion in portions:
        drafter.extend("a", rest[:portion])
        del rest[:portion]
        drafter.propose("a", 3)
    drafter.extend("a", rest)
    assert drafter.propose("a", 7) == proposed(prompt + answer, 7)


def test_a_quote_needs_few_steps() -> None:
    prompt = list(range(100))
    drafter = NgramDrafter(NgramLimits(2, 4))
    answer = [500, *range(20, 60)]
    assert saved(drafter, DraftedRequest("a", prompt), answer, 7) >= 30


def test_there_are_no_n_grams_of_nothing() -> None:
    with pytest.raises(ValueError, match="there are none"):
        NgramLimits(3, 2)
