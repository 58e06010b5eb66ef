"""Finished answers as drafts: useful, bounded, and separate by owner."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbln_backend.speculation.drafter import DraftedRequest
from rbln_backend.speculation.text_drafts import Owner, PastAnswers, SuffixDrafter, SuffixLimits
from tests.unit.speculation.texts import answered, saved

ANSWER = [*range(100, 140)]


def started(drafter: SuffixDrafter, tokens: Sequence[int], **more: str) -> list[int]:
    drafter.begin(DraftedRequest("new", (0,), **more))
    drafter.extend("new", tokens)
    draft = drafter.propose("new", 4)
    drafter.end("new", finished=False)
    return draft


def test_a_finished_answer_is_a_draft_of_the_next() -> None:
    drafter = SuffixDrafter(SuffixLimits(max_spec_factor=4))
    assert started(drafter, ANSWER[:3]) == []
    answered(drafter, "old", ANSWER)
    assert started(drafter, ANSWER[:3]) == ANSWER[3:7]
    assert saved(drafter, DraftedRequest("b", (0,)), ANSWER, 7) >= 30


def test_an_aborted_answer_is_none() -> None:
    drafter = SuffixDrafter(SuffixLimits())
    drafter.begin(DraftedRequest("old", (0,)))
    drafter.extend("old", ANSWER)
    drafter.end("old", finished=False)
    assert started(drafter, ANSWER[:3]) == []


def test_a_short_match_drafts_little() -> None:
    drafter = SuffixDrafter(SuffixLimits(max_spec_factor=1.0))
    answered(drafter, "old", ANSWER)
    assert started(drafter, ANSWER[5:7]) == ANSWER[7:9]
    assert started(drafter, ANSWER[5:9]) == ANSWER[9:13]
    assert started(SuffixDrafter(SuffixLimits(max_spec_factor=0)), [1, 2, 1, 2]) == []


def test_the_most_frequent_continuation_is_drafted_as_far_as_it_is_likely() -> None:
    for least, draft in ((0.1, [7, 8]), (0.6, [7]), (0.9, [])):
        drafter = SuffixDrafter(SuffixLimits(min_token_prob=least))
        for number, tail in enumerate(([7, 8], [6, 5], [7, 8], [7, 9])):
            answered(drafter, f"old{number}", [50 + number, 1, 2, *tail])
        assert started(drafter, [3, 1, 2]) == draft


def test_a_long_match_is_followed_past_frequent_tokens() -> None:
    drafter = SuffixDrafter(SuffixLimits())
    story = [*range(300, 310), 1, 2, 77, 78, 79, 80]
    answered(drafter, "story", story)
    for number in range(20):
        answered(drafter, f"noise{number}", [400 + number, 1, 2, 66, 67])
    drafter.begin(DraftedRequest("new", (0,)))
    for token in story[:12]:
        drafter.extend("new", [token])
        draft = drafter.propose("new", 4)
    assert draft == [77, 78, 79, 80]


def test_the_depth_bounds_what_is_compared_and_drafted() -> None:
    drafter = SuffixDrafter(SuffixLimits(max_tree_depth=5))
    answered(drafter, "old", ANSWER)
    drafter.begin(DraftedRequest("new", ANSWER[:20]))
    assert drafter.propose("new", 9) == ANSWER[20:22]


@pytest.mark.parametrize("mine", [{"key": "alice"}, {"key": "bob", "adapter": "x"}, {}])
def test_answers_stay_with_their_owner(mine: dict[str, str]) -> None:
    drafter = SuffixDrafter(SuffixLimits())
    answered(drafter, "old", ANSWER, key="bob")
    assert started(drafter, ANSWER[:3], **mine) == []
    assert started(drafter, ANSWER[:3], key="bob") != []


ANSWERS = st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=12)


@given(ANSWERS, ANSWERS, st.lists(st.integers(0, 9), max_size=8))
def test_answers_of_other_owners_change_no_draft(
    own: list[list[int]], others: list[list[int]], tokens: list[int]
) -> None:
    alone, among = (SuffixDrafter(SuffixLimits(max_tokens=4000)) for _ in range(2))
    for number, answer in enumerate(own):
        answered(alone, str(number), answer, key="me")
        for other in others[number : number + 1]:
            answered(among, f"other{number}", other, key="you")
        answered(among, str(number), answer, key="me")
    assert started(alone, tokens, key="me") == started(among, tokens, key="me")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60))), st.integers(0, 100))
def test_memory_is_bounded(answers: list[tuple[int, int]], most: int) -> None:
    past = PastAnswers(2, 3, most)
    for owner, length in answers:
        past.add(Owner(None, str(owner)), range(length))
        texts = [past.of(Owner(None, str(number))) for number in range(6)]
        assert past.num_tokens == sum(text.num_tokens for text in texts if text is not None) <= most


def test_only_so_many_answers_of_an_owner_are_kept() -> None:
    drafter = SuffixDrafter(SuffixLimits(max_cached_requests=2))
    for number in range(3):
        answered(drafter, str(number), range(number * 100, number * 100 + 30))
    assert [bool(started(drafter, range(n, n + 5))) for n in (0, 100, 200)] == [False, True, True]
    forgetful = SuffixDrafter(SuffixLimits(max_cached_requests=0))
    answered(forgetful, "old", ANSWER)
    assert started(forgetful, ANSWER[:3]) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tree_depth": 2},
        {"max_cached_requests": -1},
        {"max_spec_factor": -1.0},
        {"min_token_prob": 1.5},
    ],
)
def test_limits_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"no probability|not negative|leaves nothing"):
        SuffixLimits(**wrong)  # type: ignore[arg-type]
