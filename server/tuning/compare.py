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
from server.tuning.replay_job import Request, Round

_REPEATS = 8
# Of a record's sizes: enough to stand for all, few enough for a large model.
_MOST_MEASURED = 16


def compare_trace(
    replayer: Replayer, now: Tables, then: Tables, requests: Sequence[Request]
) -> tuple[float, float]:
    """Return the seconds of all steps of the trace with each.

    The two runs of a repeat are neighbours in time, so that a machine whose speed wanders does not
    matter: the median of their ratios counts. A first repeat warms up.
    """
    rounds = [Round(tuple(requests), sizes_of(tables)) for tables in (now, then)]
    # Now and then, then and now: neither is always the first.
    turns = [rounds[:: 1 if repeat % 2 else -1] for repeat in range(_REPEATS + 1)]
    found = replayer.run("comparing", _union(now, then), list(itertools.chain(*turns)))
    seconds = [sum(step.seconds for step in steps) for steps in found.rounds]
    pairs = [
        pair if repeat % 2 else pair[::-1]
        for repeat, pair in enumerate(zip(seconds[::2], seconds[1::2], strict=True))
    ][1:]
    typical = statistics.median(first for first, _ in pairs)
    return typical, typical * statistics.median(second / first for first, second in pairs)


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
