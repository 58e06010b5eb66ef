"""The tuner finds the best set of buckets, and predicts what it saves."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbln_backend.buckets import BucketTable
from rbln_backend.errors import BucketError
from rbln_backend.usage import StepTimes, suggest

ROWS = StepTimes({})


def cost(counts: Mapping[int, int], times: StepTimes, buckets: tuple[int, ...]) -> float:
    table = BucketTable(buckets)
    return sum(count * times.of(table.find(size)) for size, count in counts.items())


@given(
    counts=st.dictionaries(st.integers(1, 9), st.integers(0, 50), min_size=1),
    times=st.dictionaries(st.integers(1, 9), st.floats(0.001, 1.0)),
    limit=st.integers(1, 5),
)
def test_no_other_set_is_cheaper(
    counts: dict[int, int], times: dict[int, float], limit: int
) -> None:
    step_times = StepTimes(times)
    found = suggest(counts, step_times, BucketTable((2, 9)), limit)
    assert len(found.suggested) <= limit
    assert found.suggested.largest == 9
    every = ((*smaller, 9) for size in range(limit) for smaller in combinations(range(1, 9), size))
    best = min(cost(counts, step_times, buckets) for buckets in every)
    assert found.then.seconds == pytest.approx(best)
    assert found.then.seconds == pytest.approx(cost(counts, step_times, found.suggested.sizes))


def test_thousands_of_sizes_are_searched_exactly() -> None:
    # All sizes alike and a step that costs its tokens: equal distances are the best.
    counts = dict.fromkeys(range(1, 4097), 3)
    found = suggest(counts, ROWS, BucketTable((4096,)), 8)
    assert found.suggested.sizes == tuple(range(512, 4097, 512))


def test_a_worked_example() -> None:
    counts = {1: 700, 6: 250, 32: 50}
    found = suggest(counts, ROWS, BucketTable((8, 32)), 3)
    assert found.suggested.sizes == (1, 6, 32)
    assert (found.now.steps, found.then.steps) == (1000, 1000)
    assert found.now.seconds == 700 * 8 + 250 * 8 + 50 * 32
    assert found.then.seconds == 700 + 1500 + 1600
    assert (found.now.padded, found.then.padded) == (700 * 7 + 250 * 2, 0)
    assert found.now.padding == pytest.approx(5400 / 9200)
    assert found.saving == pytest.approx(1 - 3800 / 9200)


def test_a_bucket_that_saves_nothing_is_left_out() -> None:
    # Up to 4 rows a step takes the same time: smaller graphs would be for nothing.
    flat = StepTimes({1: 0.01, 4: 0.01, 8: 0.02})
    found = suggest({1: 10, 2: 10, 3: 10, 4: 10, 8: 1}, flat, BucketTable((8,)), 8)
    assert found.suggested.sizes == (4, 8)


def test_times_are_interpolated_and_never_fall() -> None:
    times = StepTimes({2: 0.2, 4: 0.1, 8: 0.6})
    assert [times.of(n) for n in (2, 3, 4, 6, 8, 10)] == pytest.approx(
        [0.2, 0.2, 0.2, 0.4, 0.6, 0.8]
    )
    assert StepTimes({4: 0.1}).of(2) == 0.1
    assert StepTimes({4: 0.1}).of(8) == 0.2
    assert StepTimes({4: 0.1, 5: 0.4}).of(2) == 0.05


def test_nothing_recorded_suggests_the_largest_alone() -> None:
    found = suggest({}, ROWS, BucketTable((1, 4)), 4)
    assert found.suggested.sizes == (4,)
    assert (found.then.steps, found.then.padding, found.saving) == (0, 0.0, 0.0)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BucketError, match=r"1 to 5 .* up to 4"):
        suggest({1: 1, 5: 1}, ROWS, BucketTable((4,)), 2)
    with pytest.raises(BucketError, match="greater than 0, got 0"):
        suggest({1: 1}, ROWS, BucketTable((4,)), 0)
