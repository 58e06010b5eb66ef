"""A client's prediction as draft: found again after each kind of edit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbln_backend.speculation.drafter import DraftedRequest, Prediction, PredictionFirst
from rbln_backend.speculation.text_drafts import NgramDrafter, NgramLimits
from tests.unit.speculation.texts import saved

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


TOKENS = st.lists(st.integers(0, 4), max_size=60)


@given(TOKENS, TOKENS, st.lists(st.integers(1, 9), max_size=30))
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


def test_an_answer_as_predicted_is_matched_token_by_token() -> None:
    prediction = Prediction(TEXT)
    prediction.extend([*TEXT, 1, 2, 3])
    assert prediction.matched == len(TEXT)
    assert prediction.propose(5) == []
