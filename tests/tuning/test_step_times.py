"""Step times of replays: of each bucket, whatever rows it held, and of those that hardly ran."""

from __future__ import annotations

import pytest

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.tuner import MeasuredTimes
from server.tuning.measure import ran_of, times_in_trace
from server.tuning.replay import Step

# Alone a full bucket takes 10 ms and 1 ms a row.
ALONE = MeasuredTimes({bucket: 0.010 + 0.001 * bucket for bucket in (2, 4, 8, 16)}, 0.001)


def _taken(bucket: int, size: int) -> float:
    """In the trace all takes 1.5 times as long, and a real row 2 ms more than a padded one."""
    return 1.5 * (0.010 + 0.001 * bucket) + 0.002 * (size - bucket)


def test_times_are_those_of_the_trace() -> None:
    ran = {
        (bucket, size): [_taken(bucket, size)] * count
        for bucket, size, count in ((4, 3, 20), (4, 4, 5), (8, 5, 9), (8, 7, 9), (16, 16, 2))
    }
    times = times_in_trace(ran, ALONE)
    assert times.row == pytest.approx(0.002)
    assert times.of(4, 3) == pytest.approx(_taken(4, 3))
    assert times.of(8, 8) == pytest.approx(_taken(8, 8))


def test_a_bucket_that_hardly_ran_takes_its_share_more() -> None:
    ran = {(4, 4): [_taken(4, 4)] * 20, (16, 16): [9.0]}
    times = times_in_trace(ran, ALONE)
    assert times.of(16, 16) == pytest.approx(1.5 * ALONE.of(16, 16))
    assert times.of(2, 2) == pytest.approx(1.5 * ALONE.of(2, 2))


def test_rows_that_ran_often_are_taken_as_they_ran() -> None:
    ran = {(4, 3): [0.5] * 12, (4, 4): [_taken(4, 4)] * 40}
    times = times_in_trace(ran, ALONE)
    assert times.of(4, 3) == 0.5
    assert times.of(4, 4) == pytest.approx(_taken(4, 4))


def test_one_slow_step_does_not_count() -> None:
    ran = {(4, 4): [_taken(4, 4)] * 20 + [9.0]}
    assert times_in_trace(ran, ALONE).of(4, 4) == pytest.approx(_taken(4, 4))


def test_without_steps_the_times_alone_stay() -> None:
    assert times_in_trace({}, ALONE) is ALONE
    assert times_in_trace({(4, 4): [0.1]}, ALONE) is ALONE


def test_what_a_step_takes_more_after_a_chunk_is_the_chunks() -> None:
    tables = {"prefill": BucketTable((16,)), "decode": BucketTable((1, 4))}
    steps = [
        Step("prefill", 9, 0.5),
        Step("decode", 3, 0.3),
        *[Step("decode", 3, 0.1)] * 2,
        Step("prefill", 12, 0.5),
    ]
    ran = ran_of([(tables, [steps])], in_trace=True)
    assert ran["prefill"][16, 9] == [pytest.approx(0.7)]
    assert ran["prefill"][16, 12] == [0.5]
    assert ran["decode"][4, 3] == pytest.approx([0.1] * 3)
    alone = ran_of([(tables, [steps])])
    assert alone["prefill"][16, 9] == [0.5]
    assert sorted(alone["decode"][4, 3]) == [0.1, 0.1, 0.3]
