"""The schedule of a trace: what the engine itself runs, step by step."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from rbln_backend.bucketing.step_times import StepTimes
from rbln_backend.bucketing.table import BucketTable
from server.commands.tune_measuring import Measuring, make_player
from server.tuning.replay import ReplayRound, Step
from server.tuning.simulator import Pace, Request, simulate, simulate_periods
from tests.checkpoints import CheckpointCache

TABLES = {"prefill": BucketTable((16, 32)), "decode": BucketTable((1, 2, 4))}
TIMES = {"prefill": StepTimes({16: 0.02, 32: 0.03}), "decode": StepTimes({1: 0.01, 4: 0.02})}


def test_a_worked_example() -> None:
    trace = [Request(0.0, 10, 3), Request(0.005, 20, 2), Request(9.0, 1, 2)]
    schedule = simulate(trace, TABLES, TIMES)
    ran = schedule.usage.phases
    # Chunk of 10, a decode step that it owes, chunk of 20, both decode; then the prompt of one
    # token, which needs no chunk.
    assert ran["prefill"].steps_by_size == {10: 1, 20: 1}
    assert ran["decode"].steps_by_size == {1: 3, 2: 1}
    assert schedule.periods == [[Request(0, 10, 3), Request(1, 20, 2)], [Request(0, 1, 2)]]
    assert ran["prefill"].seconds == pytest.approx(0.02 + 0.03)
    assert ran["decode"].seconds == pytest.approx(3 * 0.01 + (0.01 + 0.01 / 3))


def test_a_wait_within_a_period_takes_no_steps() -> None:
    for at in (1, 50):
        periods = [[Request(0, 10, 3), Request(at, 20, 2)], [Request(0, 1, 2)]]
        ran = simulate_periods(periods, TABLES, TIMES).phases
        assert ran["prefill"].steps_by_size == {10: 1, 20: 1}
        assert ran["decode"].steps_by_size == ({1: 3, 2: 1} if at == 1 else {1: 5})


def test_a_period_does_not_depend_on_how_long_a_step_takes() -> None:
    """By the clock all would have come before the second step here."""
    slow = {phase: StepTimes({1: 9.0, 64: 9.0}) for phase in TABLES}
    once = simulate([Request(0.05 * n, 10, 12) for n in range(3)], TABLES, TIMES)
    ((*_, last),) = once.periods
    assert last.at > 2
    again = simulate_periods(once.periods, TABLES, slow)
    for phase, ran in again.phases.items():
        assert ran.steps_by_size == once.usage.phases[phase].steps_by_size


def test_prompts_that_wait_share_a_chunk() -> None:
    trace = [Request(0.0, length, 2) for length in (10, 12, 30, 20)]
    pace = Pace(prefill_step_tokens=16, prefill_prompts=2)
    ran = simulate(trace, TABLES, TIMES, pace).usage.phases
    # The first two take a chunk of two prompts, the other two a chunk each.
    assert ran["prefill"].steps_by_size == {32: 1, 30: 1, 20: 1}


def test_no_more_run_at_once_than_there_are_rows() -> None:
    decode = simulate([Request(0.0, 8, 20)] * 9, TABLES, TIMES).usage.phases["decode"]
    assert max(decode.steps_by_size) == 4
    # The first token of each is that of its chunk.
    assert sum(n * count for n, count in decode.steps_by_size.items()) == 9 * 19


def _replay(argv: list[str], rounds: list[ReplayRound]) -> tuple[list[list[Step]], Pace]:
    player = make_player(argv)
    ran = [player.play(one) for one in rounds]
    player.shutdown()
    return ran, player.pace


@pytest.mark.engine
def test_the_engine_runs_the_same_steps(
    checkpoints: CheckpointCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all of its buckets, and then in some of them alone."""
    lengths = [(5, 4), (40, 9), (1, 3), (33, 2), (17, 6), (70, 5), (2, 12), (16, 1), (31, 7)]
    trace = [Request(0.03 * n, *pair) for n, pair in enumerate(lengths)]
    trace += [Request(0.0, *pair) for pair in ((6, 3), (1, 2), (9, 5))]
    argv = (str(checkpoints("llama")), "--max-model-len", "128", "--block-size", "32")
    (period,) = simulate(trace, TABLES, TIMES).periods
    few = {"prefill": BucketTable((32,)), "decode": BucketTable((2, 4))}
    rounds = [ReplayRound(period, TABLES), ReplayRound(period, few)]
    flags = [argv[0], *argv[3:], *Measuring(argv, 240.0).flags(TABLES)]
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_PLUGINS", "rbln")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        ran, pace = pool.submit(_replay, flags, rounds).result(timeout=240.0)
    counts = []
    for played, steps in zip(rounds, ran, strict=True):
        wanted = simulate_periods([period], played.tables, TIMES, pace).phases
        sizes = {phase: Counter(s.size for s in steps if s.phase == phase) for phase in TABLES}
        assert sizes == {phase: wanted[phase].steps_by_size for phase in TABLES}
        assert all(step.seconds > 0 for step in steps)
        counts.append(sizes["prefill"])
    assert counts[0] != counts[1]
