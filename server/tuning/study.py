"""The study of one record or trace: present and better buckets, what they save, and what was seen.

A record knows sizes and no requests: its saving is that of its own steps. A trace is scheduled anew
for every set of buckets, because other chunks make other steps.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.tuner import Change, StepTimes, saving, suggest
from rbln_backend.bucketing.usage import PHASES, PhaseUsage
from rbln_backend.errors import BucketError
from rbln_backend.scheduler.simulator import Pace, Tables, Times, simulate, simulate_periods
from server.tuning.measure import compare_sizes, compare_trace, measure_alone, measure_trace
from server.tuning.replayer import Replayer
from server.tuning.sources import Work

# Of a phase: each is a graph of the engine that measures.
_MOST_MEASURED = 32
# Sets that differ by a smaller share of the measured time are alike: measuring tells no more. The
# one that pads fewer rows is taken then.
_SLACK = 0.01
_GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of all steps of the work, with the present and with the new buckets."""

    now: float
    then: float

    @property
    def saving(self) -> float:
        """The share of step time saved, 0 to 1."""
        return saving(self.now, self.then)

    @property
    def gain(self) -> float:
        """More steps in the same time."""
        return 1.0 / (1.0 - self.saving) - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What came out, by phase; seconds and padding are predicted."""

    work: Work
    changes: Mapping[str, Change]
    verified: Seconds | None = None
    """As they were measured."""

    @property
    def predicted(self) -> Seconds:
        """From step times that were measured where the study is verified, else recorded."""
        changes = self.changes.values()
        return Seconds(
            sum(change.now.seconds for change in changes),
            sum(change.then.seconds for change in changes),
        )

    @property
    def suggested(self) -> Tables:
        """The new buckets by phase."""
        return {phase: change.suggested for phase, change in self.changes.items()}


def study(work: Work, limits: Mapping[str, int], replayer: Replayer | None) -> Study:
    """Return the best buckets of at most `limits` a phase; with a replayer measured and verified.

    Raises `BucketError`, and `ChildError` where an engine fails.
    """
    recorded = {phase: StepTimes(work.usage.phases[phase].mean_seconds()) for phase in PHASES}
    guess = _predict(work, recorded, limits)
    if replayer is None:
        return guess
    candidates = _candidates(guess)
    measured, engine = measure_alone(replayer, candidates)
    work = _that_fits(work, engine.max_model_len)
    if work.requests:
        periods = simulate(work.requests, work.tables, measured, engine.pace).periods
        measured = measure_trace(replayer, candidates, work.tables, periods, measured)
    found = _predict(work, measured, limits, engine.pace, _SLACK)
    sets = (work.tables, found.suggested)
    if work.requests:
        periods = simulate(work.requests, work.tables, measured, engine.pace).periods
        return replace(found, verified=Seconds(*compare_trace(replayer, sets, periods)))
    counts = {phase: change.now.steps_by_size for phase, change in found.changes.items()}
    return replace(found, verified=Seconds(*compare_sizes(replayer, sets, counts)))


def _predict(
    work: Work,
    times: Times,
    limits: Mapping[str, int],
    pace: Pace | None = None,
    slack: float = 0.0,
) -> Study:
    schedule = simulate(work.requests, work.tables, times, pace)
    ran = schedule.usage if work.requests else work.usage
    wanted = {phase: ran.phases[phase].steps_by_size for phase in PHASES}
    if work.requests:
        # Other chunks make other steps: what is left after whole chunks decides.
        wanted["prefill"] = _last_chunks(work)
    changes = {
        phase: suggest(wanted[phase], times[phase], work.tables[phase], limits[phase], slack)
        if wanted[phase]
        else _unchanged(work.tables[phase])
        for phase in PHASES
    }
    if work.requests:
        suggested = {phase: change.suggested for phase, change in changes.items()}
        then = simulate_periods(schedule.periods, suggested, times, pace)
        changes = {
            phase: replace(change, now=ran.phases[phase], then=then.phases[phase])
            for phase, change in changes.items()
        }
    return Study(work=work, changes=changes)


def _unchanged(table: BucketTable) -> Change:
    """Where nothing ran."""
    return Change(table, table, PhaseUsage(), PhaseUsage())


def _last_chunks(work: Work) -> dict[int, int]:
    largest, found = work.tables["prefill"].largest, Counter[int]()
    for request in work.requests:
        full, rest = divmod(request.prompt_tokens, largest)
        found.update({largest: full, rest: 1})
    return {size: count for size, count in found.items() if size > 1 and count}


def _candidates(guess: Study) -> dict[str, BucketTable]:
    """Buckets to measure: the present ones, a first guess, a grid, and what ran most."""
    found = {}
    for phase, change in guess.changes.items():
        # A chunk of one token never runs: it joins a decode batch.
        least = 2 if phase == "prefill" else 1
        grid = (size for size in _GRID if least <= size < change.current.largest)
        sizes = {*change.current, *change.suggested, *grid}
        counts = change.now.steps_by_size
        often = (size for size in sorted(counts, key=lambda n: -counts[n]) if size >= least)
        sizes.update(itertools.islice(often, max(0, _MOST_MEASURED - len(sizes))))
        found[phase] = BucketTable(tuple(sorted(sizes)))
    return found


def _that_fits(work: Work, max_model_len: int) -> Work:
    fits = [r for r in work.requests if r.prompt_tokens + r.output_tokens <= max_model_len]
    if work.requests and not fits:
        raise BucketError(f"No request of {work.name} fits into {max_model_len} tokens")
    return replace(work, requests=fits, left_out=len(work.requests) - len(fits))
