"""The schedule of a trace: what the engine itself runs, step by step."""

from __future__ import annotations

from collections import Counter

import pytest

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.tuner import StepTimes
from rbln_backend.scheduler.simulator import Arrival, Shapes, simulate
from server.tuning.measure import Replayer, sizes_of
from server.tuning.replay_job import Request, Round
from tests.checkpoints import CheckpointCache

TABLES = {"prefill": BucketTable((16, 32)), "decode": BucketTable((1, 2, 4))}
TIMES = {"prefill": StepTimes({16: 0.02, 32: 0.03}), "decode": StepTimes({1: 0.01, 4: 0.02})}


def test_a_worked_example() -> None:
    arrivals = [Arrival(0.0, 10, 3), Arrival(0.005, 20, 2), Arrival(9.0, 1, 2)]
    schedule = simulate(arrivals, Shapes.of(TABLES), TIMES)
    # Chunk of 10, a decode step that it owes, chunk of 20, both decode; then the prompt of one
    # token, which needs no chunk.
    assert schedule.phases["prefill"].steps_by_size == {10: 1, 20: 1}
    assert schedule.phases["decode"].steps_by_size == {1: 3, 2: 1}
    assert schedule.came_before == [(0, 0), (0, 1), (1, 0)]
    assert schedule.seconds == pytest.approx(0.02 + 0.03 + 3 * 0.01 + (0.01 + 0.01 / 3))


def test_periods_stay_apart_whatever_their_steps() -> None:
    arrivals = [Arrival(0.0, 10, 3), Arrival(0.005, 20, 2), Arrival(9.0, 1, 2)]
    shapes = Shapes.of(TABLES)
    once = simulate(arrivals, shapes, TIMES, [(0, 0), (0, 1), (1, 0)])
    # A longer wait takes no steps, and the end of a period does not depend on its length.
    again = simulate(arrivals, shapes, TIMES, [(0, 0), (0, 50), (1, 0)])
    assert once.came_before == [(0, 0), (0, 1), (1, 0)]
    assert again.came_before == [(0, 0), (0, 50), (1, 0)]
    assert again.phases["decode"].steps_by_size == {1: 5}


def test_no_more_run_at_once_than_there_are_rows() -> None:
    schedule = simulate([Arrival(0.0, 8, 20)] * 9, Shapes.of(TABLES), TIMES)
    assert max(schedule.phases["decode"].steps_by_size) == 4
    rows = sum(n * c for n, c in schedule.phases["decode"].steps_by_size.items())
    # The first token of each is that of its chunk.
    assert rows == 9 * 19


@pytest.mark.engine
def test_the_engine_runs_the_same_steps(checkpoints: CheckpointCache) -> None:
    """In all of its buckets, and then in some of them alone."""
    lengths = [(5, 4), (40, 9), (1, 3), (33, 2), (17, 6), (70, 5), (2, 12), (16, 1), (31, 7)]
    arrivals = [Arrival(0.03 * n, *pair) for n, pair in enumerate(lengths)]
    flags = ("--max-model-len", "128", "--block-size", "32")
    replayer = Replayer((str(checkpoints("llama")), *flags), 240.0)
    planned = simulate(arrivals, Shapes.of(TABLES), TIMES)
    requests = tuple(
        Request(step, arrival.prompt_tokens, arrival.output_tokens)
        for (period, step), arrival in zip(planned.came_before, arrivals, strict=True)
        if period == 0
    )
    few = {"prefill": BucketTable((32,)), "decode": BucketTable((2, 4))}
    rounds = [Round(requests, sizes_of(tables)) for tables in (TABLES, few)]
    result = replayer.run("replay", TABLES, rounds)
    counts = []
    for tables, steps in zip((TABLES, few), result.rounds, strict=True):
        settled = Shapes(
            *(tables["prefill"], tables["decode"], 4),
            decode_steps_per_chunk=result.about["decode_steps_per_chunk"],
            prefill_step_tokens=result.about["prefill_step_tokens"],
        )
        wanted = simulate(arrivals, settled, TIMES, planned.came_before)
        ran = {phase: Counter(s.size for s in steps if s.phase == phase) for phase in TABLES}
        assert ran == {phase: wanted.phases[phase].steps_by_size for phase in TABLES}
        assert all(step.seconds > 0 for step in steps)
        counts.append(ran["prefill"])
    assert counts[0] != counts[1]
