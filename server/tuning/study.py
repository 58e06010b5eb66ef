"""The study of one record or trace: present and better buckets, what they save, and what was seen.

A record knows sizes and no requests: its saving is that of its own steps. A trace is scheduled anew
for every set of buckets, because other chunks make other steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.tuner import StepTimes, padding_share, suggest_buckets
from rbln_backend.bucketing.usage import PHASES, Usage
from rbln_backend.scheduler.simulator import Arrival, Schedule, Shapes, simulate
from server.tuning.compare import compare_sizes, compare_trace
from server.tuning.measure import Replayer, Tables, measure_times
from server.tuning.replay_job import Request
from server.tuning.trace_times import trace_times

Counts = Mapping[str, Mapping[int, int]]
# Of a phase: each is a graph of the engine that measures.
_MOST_MEASURED = 32
# Sets that differ by a smaller share of the measured time are alike: measuring tells no more. The
# one that pads fewer rows is taken then.
_SLACK = 0.01
_GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is to be run fast: a record's steps, or a trace of requests."""

    name: str
    tables: Tables
    """The present buckets by phase."""
    usage: Usage
    arrivals: Sequence[Arrival] = ()
    left_out: int = 0
    """Requests of the trace that the engine would refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Seconds of all steps as they were measured with the present and with the new buckets."""

    now_s: float
    then_s: float

    @property
    def saving(self) -> float:
        """The share of time that was saved."""
        return 1.0 - self.then_s / self.now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What came out; seconds and padding are predicted for all steps of the work."""

    work: Work
    suggested: Tables
    counts: Counts
    """Steps by phase and size, with the present buckets."""
    times: Mapping[str, StepTimes]
    seconds_now: float
    seconds_then: float
    padding_now: Mapping[str, float]
    padding_then: Mapping[str, float]
    measured: bool = False
    verified: Verified | None = None

    @property
    def saving(self) -> float:
        """The predicted share of step time saved, 0 to 1."""
        return 1.0 - self.seconds_then / self.seconds_now if self.seconds_now else 0.0


def study(work: Work, limits: Mapping[str, int], replayer: Replayer | None) -> Study:
    """Return the best buckets of at most `limits` a phase; with a replayer measured and verified.

    Raises `BucketError`, and `ChildError` where an engine fails.
    """
    times = {phase: StepTimes(work.usage.phases[phase].mean_seconds()) for phase in PHASES}
    if replayer is None:
        return _predict(work, Shapes.of(work.tables), times, limits)
    candidates = _candidates(work, limits, times)
    measured, about = measure_times(replayer, candidates)
    shapes = replace(
        Shapes.of(work.tables),
        decode_steps_per_chunk=about["decode_steps_per_chunk"],
        prefill_step_tokens=about["prefill_step_tokens"],
    )
    work = _that_fits(work, about["max_model_len"])
    if work.arrivals:
        periods = _periods(work, shapes, measured)
        measured = trace_times(replayer, candidates, work.tables, periods, measured)
    found = replace(_predict(work, shapes, measured, limits, _SLACK), measured=True)
    return replace(found, verified=_verify(found, shapes, replayer))


def _predict(
    work: Work,
    shapes: Shapes,
    times: Mapping[str, StepTimes],
    limits: Mapping[str, int],
    slack: float = 0.0,
) -> Study:
    if work.arrivals:
        now = simulate(work.arrivals, shapes, times)
        phases = now.phases
    else:
        now, phases = None, work.usage.phases
    counts = {phase: phases[phase].steps_by_size for phase in PHASES}
    wanted = dict(counts)
    if now is not None:
        # Other chunks make other steps: what is left after whole chunks decides.
        wanted["prefill"] = _last_chunks(work.arrivals, work.tables["prefill"].largest)
    suggested = _suggest(work, wanted, times, limits, slack)
    then = None
    if now is not None:
        then = simulate(work.arrivals, shapes.with_tables(suggested), times, now.came_before)
    return Study(
        work=work,
        suggested=suggested,
        counts=counts,
        times=times,
        seconds_now=_seconds(counts, work.tables, times) if now is None else now.seconds,
        seconds_then=_seconds(counts, suggested, times) if then is None else then.seconds,
        padding_now=_paddings(counts, work.tables),
        padding_then=_paddings(_sizes(then) if then else counts, suggested),
    )


def _suggest(
    work: Work,
    wanted: Counts,
    times: Mapping[str, StepTimes],
    limits: Mapping[str, int],
    slack: float,
) -> dict[str, BucketTable]:
    """The best table of each phase; where nothing ran, the present one."""
    found = dict(work.tables)
    for phase, table in work.tables.items():
        if wanted[phase]:
            best = suggest_buckets(wanted[phase], times[phase], table, limits[phase], slack)
            found[phase] = BucketTable(best.buckets)
    return found


def _last_chunks(arrivals: Sequence[Arrival], largest: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for arrival in arrivals:
        full, rest = divmod(arrival.prompt_tokens, largest)
        for size, count in ((largest, full), (rest, 1)):
            if size > 1 and count:
                found[size] = found.get(size, 0) + count
    return found


def _candidates(work: Work, limits: Mapping[str, int], times: Mapping[str, StepTimes]) -> Tables:
    """Buckets to measure: the present ones, a first guess, a grid, and what ran most."""
    guess = _predict(work, Shapes.of(work.tables), times, limits)
    found = {}
    for phase, table in work.tables.items():
        # A chunk of one token never runs: it joins a decode batch.
        least = 2 if phase == "prefill" else 1
        grid = (size for size in _GRID if least <= size < table.largest)
        sizes = {*table, *guess.suggested[phase], *grid}
        counts = guess.counts[phase]
        often = (size for size in sorted(counts, key=lambda n: -counts[n]) if size >= least)
        sizes.update(itertools.islice(often, max(0, _MOST_MEASURED - len(sizes))))
        found[phase] = BucketTable(tuple(sorted(sizes)))
    return found


def _that_fits(work: Work, max_model_len: int) -> Work:
    fits = [a for a in work.arrivals if a.prompt_tokens + a.output_tokens <= max_model_len]
    return replace(work, arrivals=fits, left_out=len(work.arrivals) - len(fits))


def _verify(found: Study, shapes: Shapes, replayer: Replayer) -> Verified:
    """Run the work with the present and with the new buckets."""
    sets = (found.work.tables, found.suggested)
    if found.work.arrivals:
        periods = _periods(found.work, shapes, found.times)
        now, then = compare_trace(replayer, *sets, periods)
    else:
        now, then = compare_sizes(replayer, *sets, found.counts)
    return Verified(now_s=now, then_s=then)


def _periods(work: Work, shapes: Shapes, times: Mapping[str, StepTimes]) -> list[list[Request]]:
    """The requests of each busy period of the trace, and the steps before which they come."""
    moments = simulate(work.arrivals, shapes, times).came_before
    periods: list[list[Request]] = [[] for _ in range(moments[-1][0] + 1)]
    for (period, step), arrival in zip(moments, work.arrivals, strict=True):
        periods[period].append(Request(step, arrival.prompt_tokens, arrival.output_tokens))
    return periods


def _sizes(schedule: Schedule) -> dict[str, dict[int, int]]:
    return {phase: schedule.phases[phase].steps_by_size for phase in PHASES}


def _seconds(counts: Counts, tables: Tables, times: Mapping[str, StepTimes]) -> float:
    return sum(
        count * times[phase].of(tables[phase].find(size), size)
        for phase in PHASES
        for size, count in counts[phase].items()
    )


def _paddings(counts: Counts, tables: Tables) -> dict[str, float]:
    return {phase: padding_share(counts[phase], tables[phase]) for phase in PHASES}
