"""What the present and new buckets really take: one engine has both, and they take turns."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.usage import PHASES
from server.tuning.measure import (
    Replayer,
    Tables,
    median_seconds,
    rounds_of,
    run_passes,
    sizes_of,
)
from server.tuning.replay_job import Request, Round, Step

_REPEATS = 8
# Of a record's sizes: enough to stand for all, few enough for a large model.
_MOST_MEASURED = 16


def compare_trace(
    replayer: Replayer, now: Tables, then: Tables, periods: Sequence[Sequence[Request]]
) -> tuple[float, float]:
    """Return the seconds of all steps of the trace with each, a step being what it mostly takes.

    Every busy period runs with one and then with the other, so that a machine whose speed wanders
    counts for little; each step is the median of its repeats, so that what interrupts one counts
    for nothing. A first repeat warms up. Raises `ChildError`.
    """
    sizes = [sizes_of(tables) for tables in (now, then)]
    turns = [
        # Neither is always the first.
        (period, which ^ (period + repeat) % 2)
        for repeat in range(_REPEATS + 1)
        for period in range(len(periods))
        for which in (0, 1)
    ]
    rounds = [Round(tuple(periods[period]), sizes[which]) for period, which in turns]
    found = replayer.run("comparing", _union(now, then), rounds)
    ran: dict[tuple[int, int], list[Sequence[Step]]] = {turn: [] for turn in turns}
    warm_up = 2 * len(periods)
    for turn, steps in zip(turns[warm_up:], found.rounds[warm_up:], strict=True):
        ran[turn].append(steps)
    seconds = [0.0, 0.0]
    for (_, which), repeats in ran.items():
        seconds[which] += _typical_seconds(repeats)
    return seconds[0], seconds[1]


def _typical_seconds(repeats: Sequence[Sequence[Step]]) -> float:
    """The sum over the steps, the same ones in every repeat, of their median seconds."""
    seconds = 0.0
    for same in zip(*repeats, strict=True):
        seconds += statistics.median(step.seconds for step in same)
    return seconds


def compare_sizes(
    replayer: Replayer, now: Tables, then: Tables, counts: Mapping[str, Mapping[int, int]]
) -> tuple[float, float]:
    """Return the seconds of all steps of `counts`, by phase and size, with each."""
    few = {phase: _few(counts[phase]) for phase in PHASES}
    rounds = [rounds_of(tables, few) for tables in (now, then)]
    ran, _ = run_passes(replayer, "comparing", _union(now, then), [*rounds[0], *rounds[1]])
    half = len(rounds[0])
    first, second = (median_seconds(itertools.chain(*part)) for part in (ran[:half], ran[half:]))
    return _total(few, first), _total(few, second)


def _total(
    counts: Mapping[str, Mapping[int, int]], seconds: Mapping[str, Mapping[int, float]]
) -> float:
    return sum(
        count * seconds[phase].get(size, 0.0)
        for phase in PHASES
        for size, count in counts[phase].items()
    )


def _few(counts: Mapping[int, int]) -> dict[int, int]:
    """The sizes that ran most, which stand for the others in proportion."""
    most = sorted(counts, key=lambda size: (-counts[size], size))[:_MOST_MEASURED]
    share = sum(counts.values()) / max(sum(counts[size] for size in most), 1)
    return {size: round(counts[size] * share) for size in sorted(most)}


def _union(now: Tables, then: Tables) -> Tables:
    return {phase: BucketTable(tuple(sorted({*now[phase], *then[phase]}))) for phase in PHASES}
