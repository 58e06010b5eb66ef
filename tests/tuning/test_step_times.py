"""Step times of replays: of each bucket, whatever rows it held, and of those that hardly ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rbln_backend.bucketing.step_times import MeasuredTimes
from rbln_backend.bucketing.table import BucketTable
from server.tuning.measure import (
    compare_sizes,
    compare_trace,
    measure_alone,
    ran_of,
    times_in_trace,
)
from server.tuning.replay import ReplayRound, Step
from server.tuning.simulator import Request

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


class _Steady:
    """An engine whose steps take 10 ms, 1 ms for a row of the bucket and 2 ms for a real one."""

    max_model_len = 128

    def run(
        self, _: str, groups: Sequence[Sequence[ReplayRound]], repeats: int
    ) -> dict[tuple[int, int], list[list[Step]]]:
        return {
            (n, which): [[self._step(one)] * 3] * repeats
            for n, group in enumerate(groups)
            for which, one in enumerate(group)
        }

    def _step(self, played: ReplayRound) -> Step:
        first = played.requests[0]
        decodes = first.output_tokens > 1
        phase, size = (
            ("decode", len(played.requests)) if decodes else ("prefill", first.prompt_tokens)
        )
        bucket = played.tables[phase].find(size)
        return Step(phase, size, 0.010 + 0.001 * bucket + 0.002 * size)


@pytest.mark.parametrize("sizes", [(1, 2, 3, 4, 8), tuple(range(1, 33))])
def test_a_real_row_is_told_from_a_padded_one_with_few_buckets_and_many(
    sizes: tuple[int, ...],
) -> None:
    tables = {"prefill": BucketTable((16, 64)), "decode": BucketTable(sizes)}
    player: Any = _Steady()
    times = measure_alone(player, tables)["decode"]
    assert times.row == pytest.approx(0.002)
    assert times.of(8, 3) == pytest.approx(0.010 + 0.008 + 0.006)


def test_both_sets_are_compared_at_the_same_steps() -> None:
    now = {"prefill": BucketTable((64,)), "decode": BucketTable((8,))}
    then = {"prefill": BucketTable((64,)), "decode": BucketTable((3, 8))}
    player: Any = _Steady()
    before, after = compare_sizes(player, [now, then], {"prefill": {}, "decode": {3: 100}})
    assert before == pytest.approx(100 * (0.010 + 0.008 + 0.006))
    assert after == pytest.approx(100 * (0.010 + 0.003 + 0.006))
    periods = [[Request(0, 32, 9)] * 3]
    traced = compare_trace(player, [now, then], periods)
    assert traced == pytest.approx([before * 3 / 100, after * 3 / 100])
