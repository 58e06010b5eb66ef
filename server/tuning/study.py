"""Study of one record or trace: current and suggested buckets, predicted and measured savings.

A record has sizes but no requests: its saving is that of its own steps. A trace is simulated again
for every set of buckets, because other chunks lead to other steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rbln_backend.bucketing.step_times import StepTimes
from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.usage import PHASES, PhaseUsage
from server.tuning.search import LEAST_STEPS, Change, suggest
from server.tuning.simulator import Pace, Tables, Times, simulate, simulate_periods
from server.tuning.sources import Work

# Per phase; each bucket is a graph of the measuring engine.
_MOST_MEASURED = 32
_GRID = tuple(2**power for power in range(14))


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of all steps of the work, with the current and with the suggested buckets."""

    now: float
    then: float

    @property
    def saving(self) -> float:
        """Share of step time saved, 0 to 1."""
        return 1.0 - self.then / self.now if self.now > 0 else 0.0

    @property
    def gain(self) -> float:
        """Relative increase of steps in the same time."""
        return 1.0 / (1.0 - self.saving) - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Changes by phase with predicted seconds and padding."""

    work: Work
    changes: Mapping[str, Change]
    verified: Seconds | None = None
    """Measured seconds; None if only predicted."""

    @property
    def predicted(self) -> Seconds:
        """Prediction from measured step times if the study is verified, else from recorded ones."""
        changes = self.changes.values()
        now, then = (change.now.seconds for change in changes), (c.then.seconds for c in changes)
        return Seconds(sum(now), sum(then))

    @property
    def suggested(self) -> Tables:
        """Suggested buckets by phase."""
        return {phase: change.suggested for phase, change in self.changes.items()}


def study(
    work: Work,
    limits: Mapping[str, int],
    times: Times | None = None,
    pace: Pace | None = None,
    slack: float = 0.0,
) -> Study:
    """Return the best buckets of at most `limits` per phase, by default from recorded times.

    Raises `BucketError` where a step fits into no bucket.
    """
    recorded = {p: StepTimes(work.usage.phases[p].mean_seconds(LEAST_STEPS)) for p in PHASES}
    times = times or recorded
    schedule = simulate(work.requests, work.tables, times, pace)
    ran = (schedule.usage if work.requests else work.usage).phases
    counts = {phase: ran[phase].steps_by_size for phase in PHASES}
    if work.requests:
        # Steps depend on the chunks: only the rest after full chunks can be optimised.
        counts["prefill"] = _last_chunks(work)
    changes = {}
    for phase, table in work.tables.items():
        changes[phase] = Change(table, table, PhaseUsage(), PhaseUsage())
        if counts[phase]:
            changes[phase] = suggest(counts[phase], times[phase], table, limits[phase], slack)
    found = Study(work=work, changes=changes)
    if not work.requests:
        return found
    then = simulate_periods(schedule.periods, found.suggested, times, pace).phases
    changes = {p: replace(change, now=ran[p], then=then[p]) for p, change in changes.items()}
    return Study(work=work, changes=changes)


def _last_chunks(work: Work) -> dict[int, int]:
    largest, found = work.tables["prefill"].largest, Counter[int]()
    for request in work.requests:
        full, rest = divmod(request.prompt_tokens, largest)
        found.update({largest: full, rest: 1})
    return {size: count for size, count in found.items() if size > 1 and count}


def candidates(guess: Study) -> dict[str, BucketTable]:
    """Return buckets to measure: current, guessed, a grid, and the most frequent sizes."""
    return {phase: _candidates(phase, change) for phase, change in guess.changes.items()}


def _candidates(phase: str, change: Change) -> BucketTable:
    # A chunk of one token never runs: it joins a decode batch.
    least = 2 if phase == "prefill" else 1
    sizes = {*change.current, *change.suggested}
    sizes.update(size for size in _GRID if least <= size < change.current.largest)
    most = Counter(change.now.steps_by_size).most_common()
    often = [size for size, _ in most if size >= least]
    sizes.update(often[: max(0, _MOST_MEASURED - len(sizes))])
    return BucketTable(tuple(sorted(sizes)))
