"""The index finds what a linear search finds, in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbln_backend.speculation.text_drafts import GAP, TextIndex

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


def test_a_text_needs_tokens_to_be_found_by() -> None:
    with pytest.raises(ValueError, match="cannot be found"):
        TextIndex(0, 10)
