"""Step times within a trace, where a step after a chunk of a prompt finds colder caches."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.tuner import MeasuredTimes
from rbln_backend.bucketing.usage import PHASES
from server.tuning.measure import Replayer, Tables, sizes_of
from server.tuning.replay_job import Request, Round, Step

# Divisions of the buckets into halves, each a set to replay with.
_DIVISIONS = 4
# How often the present buckets are among the sets: half of all steps that are predicted are theirs.
_PRESENT = 2
# Fewer steps say too little of a bucket, and of rows in it.
_LEAST_STEPS = 12

Ran = dict[tuple[int, int], list[float]]
"""Seconds of each step of one phase by its bucket and size."""


def trace_times(
    replayer: Replayer,
    tables: Tables,
    present: Tables,
    periods: Sequence[Sequence[Request]],
    alone: Mapping[str, MeasuredTimes],
) -> dict[str, MeasuredTimes]:
    """Return step times by phase from replays with half of the buckets each, or with the present.

    A bucket that the replays used too little takes what it takes `alone`, times what the others
    take more here. Raises `ChildError`.
    """
    sets = [*_halves(tables), *[present] * _PRESENT]
    # Each period with each set, and at any time all of the sets: a slow moment meets them alike.
    # The first repeat warms up.
    turns = [
        (period, (repeat + period) % len(sets))
        for repeat in range(-1, len(sets))
        for period in range(len(periods))
    ]
    rounds = [Round(tuple(periods[period]), sizes_of(sets[which])) for period, which in turns]
    found = replayer.run("measuring the trace", tables, rounds)
    counted = list(zip(turns, found.rounds, strict=True))[len(periods) :]
    ran = steps_of([(sets[which], steps) for (_, which), steps in counted])
    return {phase: times_of(ran[phase], alone[phase]) for phase in PHASES}


def steps_of(rounds: Sequence[tuple[Tables, Sequence[Step]]]) -> dict[str, Ran]:
    """Return what ran by phase; what a decode step takes more after a chunk is the chunk's."""
    after: Ran = defaultdict(list)
    ran: dict[str, Ran] = {phase: defaultdict(list) for phase in PHASES}
    chunks: list[tuple[tuple[int, int], float, bool]] = []
    for tables, steps in rounds:
        for before, step, following in zip([None, *steps], steps, [*steps[1:], None], strict=False):
            key = (tables[step.phase].find(step.size), step.size)
            if step.phase == "prefill":
                delays = following is not None and following.phase == "decode"
                chunks.append((key, step.seconds, delays))
            else:
                is_after = before is not None and before.phase == "prefill"
                (after if is_after else ran["decode"])[key].append(step.seconds)
    delay = _delay(after, ran["decode"])
    for key, seconds in after.items():
        ran["decode"][key] += (one - delay for one in seconds)
    for key, taken, delays in chunks:
        ran["prefill"][key].append(taken + delay * delays)
    return ran


def times_of(ran: Ran, alone: MeasuredTimes) -> MeasuredTimes:
    """Return the times of one phase."""
    row = _row_seconds(ran, alone.row)
    by_bucket: dict[int, list[float]] = defaultdict(list)
    for (bucket, size), taken in ran.items():
        by_bucket[bucket] += (seconds + row * (bucket - size) for seconds in taken)
    full = {
        bucket: statistics.median(taken)
        for bucket, taken in by_bucket.items()
        if len(taken) >= _LEAST_STEPS
    }
    if not full:
        return alone
    more = statistics.median(s / alone.of(bucket, bucket) for bucket, s in full.items())
    return MeasuredTimes(
        {b: seconds * more for b, seconds in alone.full.items()} | full,
        row,
        {key: statistics.median(taken) for key, taken in ran.items() if len(taken) >= _LEAST_STEPS},
    )


def _delay(after: Ran, otherwise: Ran) -> float:
    """What a decode step takes more after a chunk: the median over sizes that ran both ways."""
    more = [
        [statistics.median(seconds) - statistics.median(otherwise[key])] * len(seconds)
        for key, seconds in after.items()
        if key in otherwise
    ]
    return max(0.0, statistics.median(itertools.chain(*more))) if more else 0.0


def _row_seconds(ran: Ran, otherwise: float) -> float:
    """What one row more takes in the same bucket, over all buckets with rows of several counts."""
    sizes: dict[int, list[tuple[int, float, int]]] = defaultdict(list)
    for (bucket, size), taken in ran.items():
        sizes[bucket].append((size, statistics.median(taken), len(taken)))
    rise = spread = 0.0
    for found in sizes.values():
        steps = sum(count for _, _, count in found)
        mean_size = sum(size * count for size, _, count in found) / steps
        mean_seconds = sum(seconds * count for _, seconds, count in found) / steps
        for size, seconds, count in found:
            rise += count * (size - mean_size) * (seconds - mean_seconds)
            spread += count * (size - mean_size) ** 2
    return max(0.0, rise / spread) if spread else otherwise


def _halves(tables: Tables) -> Iterator[Tables]:
    """Both halves of a division of the buckets, and so on; the largest are in each."""
    drawn = random.Random(0)
    for _ in range(_DIVISIONS):
        taken = {
            phase: {bucket for bucket in table if drawn.random() < 0.5}
            for phase, table in tables.items()
        }
        for half in (taken, {phase: {*table} - taken[phase] for phase, table in tables.items()}):
            yield {
                phase: BucketTable(tuple(sorted({*half[phase], table.largest})))
                for phase, table in tables.items()
            }
