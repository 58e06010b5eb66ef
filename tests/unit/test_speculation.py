"""Finished answers as drafts: useful, bounded, and separate by owner."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbln_backend.speculation.drafter import (
    EXTRA_ARGS,
    FIRST,
    LARGEST_LOSS,
    LEAST_PLAIN,
    MOST_CHECKS,
    SHARE,
    DraftBudget,
    DraftedRequest,
    Drafter,
    DraftSettings,
    Prediction,
    PredictionFirst,
)
from rbln_backend.speculation.text_drafts import (
    GAP,
    NgramDrafter,
    NgramLimits,
    Owner,
    PastAnswers,
    SuffixDrafter,
    SuffixLimits,
    TextIndex,
)

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
    # An aborted one is none.
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
    ("make", "wrong", "message"),
    [
        (SuffixLimits, {"max_tree_depth": 2}, "leaves nothing"),
        (SuffixLimits, {"max_cached_requests": -1}, "not negative"),
        (SuffixLimits, {"max_spec_factor": -1.0}, "not negative"),
        (SuffixLimits, {"min_token_prob": 1.5}, "no probability"),
        (lambda: NgramLimits(3, 2), {}, "there are none"),
        (lambda: TextIndex(0, 10), {}, "cannot be found"),
    ],
)
def test_limits_out_of_range_are_refused(make: Any, wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**wrong)


# -------------------------------------------------------------------------------------------- ngram
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
    # A quote needs few steps.
    request = DraftedRequest("a", list(range(100)))
    assert saved(NgramDrafter(NgramLimits(2, 4)), request, [500, *range(20, 60)], 7) >= 30


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


# --------------------------------------------------------------------------------------- prediction
TEXT = [n * n % 1009 for n in range(200)]


def drafter() -> PredictionFirst:
    return PredictionFirst(NgramDrafter(NgramLimits(3, 3)))


@pytest.mark.parametrize(
    ("answer", "most_steps"),
    [
        pytest.param(TEXT, 25, id="as predicted"),
        pytest.param([*TEXT[:90], 5000, *TEXT[91:]], 27, id="one token replaced"),
        pytest.param(TEXT[:90] + TEXT[93:], 27, id="a few left out"),
        pytest.param(TEXT[:60] + TEXT[120:], 30, id="many left out"),
        pytest.param([*TEXT[:90], 5000, 5001, 5002, *TEXT[90:]], 31, id="a few put in"),
        pytest.param([*TEXT[:90], 5000, *TEXT[93:]], 30, id="three replaced by one"),
        pytest.param([5000, 5001, *TEXT], 30, id="begins otherwise"),
        pytest.param(TEXT[100:] + TEXT[:100], 33, id="halves exchanged"),
    ],
)
def test_the_answer_is_found_again(answer: list[int], most_steps: int) -> None:
    request = DraftedRequest("a", (7, 8, 9), prediction=TEXT)
    assert len(answer) - saved(drafter(), request, answer, 7) <= most_steps
    prediction = Prediction(TEXT)
    prediction.extend([*TEXT, 1, 2, 3])
    assert (prediction.matched, prediction.propose(5)) == (len(TEXT), [])


def test_without_a_prediction_the_other_drafter_is_used() -> None:
    both = drafter()
    both.begin(DraftedRequest("a", (1, 2, 3, 4, 1, 2, 3)))
    both.begin(DraftedRequest("b", (1, 2, 3, 4, 1, 2, 3), prediction=(9, 8)))
    assert both.propose("a", 2) == [4, 1]
    assert both.propose("b", 2) == both.predicted("b", 2) == [9, 8]
    assert both.predicted("a", 2) == []
    both.extend("b", [9, 8])
    assert both.propose("b", 2) == []
    both.end("a", finished=True)
    with pytest.raises(KeyError):
        both.propose("a", 2)


PREDICTION_TOKENS = st.lists(st.integers(0, 4), max_size=60)


@given(PREDICTION_TOKENS, PREDICTION_TOKENS, st.lists(st.integers(1, 9), max_size=30))
def test_it_depends_on_the_tokens_and_not_on_their_portions(
    predicted: list[int], answer: list[int], portions: list[int]
) -> None:
    whole, parts = Prediction(predicted), Prediction(predicted)
    whole.extend(answer)
    rest = list(answer)
    for portion in portions:
        parts.propose(3)
        parts.extend(rest[:portion])
        del rest[:portion]
    parts.extend(rest)
    assert parts.propose(9) == whole.propose(9)
    assert parts.matched == whole.matched <= len(answer)


# --------------------------------------------------------------------------------------- text index
TEXTS = st.lists(st.sampled_from([GAP, 0, 1, 2, 200_000]), max_size=80)


@given(TEXTS, st.integers(1, 3), st.integers(3, 20))
def test_the_places_of_the_last_tokens_are_those_of_a_search(
    tokens: list[int], gram: int, capacity: int
) -> None:
    text = TextIndex(gram, capacity)
    text.extend(tokens)
    tail = tokens[-gram:]
    first = max(len(tokens) - capacity, 0) + gram
    expected = [
        place
        for place in range(len(tokens) - 1, first - 1, -1)
        if tokens[place - gram : place] == tail
    ]
    if len(tail) < gram or GAP in tail:
        expected = []
    assert list(text.positions(text.key, len(tokens))) == expected
    assert text.num_tokens <= capacity
    assert len(text._latest) <= capacity
    for place in expected:
        limit = 9
        assert text.match(place, tail) == gram
        # The text is taken to repeat itself from the place.
        repeated = tokens[place:] * limit
        cut = repeated.index(GAP) if GAP in repeated else len(repeated)
        assert text.continuation(place, limit) == repeated[: min(cut, limit)]


def test_text_before_the_start_is_not_found() -> None:
    text = TextIndex(2, 100)
    text.extend([1, 2, 3, 1, 2, 4, 1, 2])
    assert list(text.positions(text.key, 9)) == [5, 2]
    text.start = 1
    assert list(text.positions(text.key, 9)) == [5]
    assert text.at(0) == GAP


# ------------------------------------------------------------------------------------- draft budget
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


# ------------------------------------------------------------------------------------------ drafter
def test_settings_are_read_and_anything_but_a_mapping_counts_as_absent() -> None:
    for extra_args in (None, {}, *({EXTRA_ARGS: x} for x in ("x", 5, 1.5, [1], [], None))):
        assert DraftSettings.of(extra_args) == DraftSettings()
    given = {EXTRA_ARGS: {"off": True, "prediction": [3, 4], "key": "ours"}, "other": 1}
    assert DraftSettings.of(given) == DraftSettings(off=True, prediction=(3, 4), key="ours")


# -------------------------------------------------------------------------------------------- texts
def answered(drafter: Drafter, name: str, answer: Sequence[int], *, key: str | None = None) -> None:
    """Begin a request of one prompt token, answer it and finish it."""
    drafter.begin(DraftedRequest(name, (0,), key=key))
    drafter.extend(name, answer)
    drafter.end(name, finished=True)


def saved(drafter: Drafter, request: DraftedRequest, answer: Sequence[int], limit: int) -> int:
    """Decode `answer` with drafts; return how many of its tokens needed no step of their own."""
    drafter.begin(request)
    done = steps = 0
    while done < len(answer):
        draft = drafter.propose(request.request_id, limit)
        assert len(draft) <= limit
        taken = 1
        while taken <= len(draft) and answer[done : done + taken] == draft[:taken]:
            taken += 1
        taken = min(taken, len(answer) - done)
        drafter.extend(request.request_id, answer[done : done + taken])
        done += taken
        steps += 1
    drafter.end(request.request_id, finished=True)
    return len(answer) - steps
