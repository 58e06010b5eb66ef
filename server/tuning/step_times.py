"""From the steps that ran to step times by bucket and rows.

In a trace a decode step after a chunk of a prompt finds colder caches than among its like.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rbln_backend.bucketing.tuner import MeasuredTimes
from rbln_backend.bucketing.usage import PHASES
from server.tuning.replayer import Round, Step

# Fewer steps say too little of a bucket, and of rows in it.
_LEAST_STEPS = 12

Ran = Mapping[tuple[int, int], list[float]]
"""Seconds of each step of one phase by its bucket and size."""


def ran_of(
    rounds: Sequence[Round], ran: Sequence[Sequence[Sequence[Step]]], *, in_trace: bool = False
) -> dict[str, Ran]:
    """Return by phase what `ran` of each round, time after time.

    In a trace what a decode step takes more after a chunk is the chunk's.
    """
    by: dict[tuple[str, bool], dict[tuple[int, int], list[float]]]
    by = defaultdict(lambda: defaultdict(list))
    repeats = zip(rounds, ran, strict=True)
    for tables, steps in ((one.tables, steps) for one, runs in repeats for steps in runs):
        phases = ["", *(step.phase for step in steps), ""]
        for before, step, following in zip(phases, steps, phases[2:], strict=False):
            is_chunk = step.phase == "prefill"
            meets = following == "decode" if is_chunk else before == "prefill"
            bucket = tables[step.phase].find(step.size)
            by[step.phase, meets][bucket, step.size].append(step.seconds)
    delay = _delay(by["decode", True], by["decode", False]) if in_trace else 0.0
    for phase, more in (("decode", -delay), ("prefill", delay)):
        for key, taken in by[phase, True].items():
            by[phase, False][key] += (seconds + more for seconds in taken)
    return {phase: by[phase, False] for phase in PHASES}


def bucket_seconds(ran: Ran, row: float = 0.0, least: int = 1) -> dict[int, float]:
    """Return the median seconds of full buckets that ran `least` times.

    A row that holds nothing is taken to be `row` seconds faster than one that does.
    """
    found: dict[int, list[float]] = defaultdict(list)
    for (bucket, size), taken in ran.items():
        found[bucket] += (seconds + row * (bucket - size) for seconds in taken)
    return {b: statistics.median(taken) for b, taken in found.items() if len(taken) >= least}


def row_seconds(ran: Ran, otherwise: float = 0.0) -> float:
    """Return what one row more takes in the same bucket, not less than nothing.

    That is the slope over all buckets with rows of several counts, `otherwise` without any.
    """
    by_bucket: dict[int, list[tuple[int, float, int]]] = defaultdict(list)
    for (bucket, size), taken in ran.items():
        by_bucket[bucket].append((size, statistics.median(taken), len(taken)))
    rise = spread = 0.0
    for found in by_bucket.values():
        sizes, _, weights = zip(*found, strict=True)
        middle = statistics.fmean(sizes, weights)
        rise += sum(n * (size - middle) * s for size, s, n in found)
        spread += sum(n * (size - middle) ** 2 for size, _, n in found)
    return max(0.0, rise / spread) if spread else otherwise


def times_in_trace(ran: Ran, alone: MeasuredTimes) -> MeasuredTimes:
    """Return the times of one phase within a trace.

    A bucket that ran too little takes what it takes `alone`, times what the others take more here.
    """
    row = row_seconds(ran, alone.row)
    full = bucket_seconds(ran, row, _LEAST_STEPS)
    if not full:
        return alone
    more = statistics.median(s / alone.of(bucket, bucket) for bucket, s in full.items())
    often = {key: taken for key, taken in ran.items() if len(taken) >= _LEAST_STEPS}
    return MeasuredTimes(
        {bucket: seconds * more for bucket, seconds in alone.full.items()} | full,
        row,
        {key: statistics.median(taken) for key, taken in often.items()},
    )


def _delay(after: Ran, otherwise: Ran) -> float:
    """What a decode step takes more after a chunk: the median over sizes that ran both ways."""
    more = [
        [statistics.median(seconds) - statistics.median(otherwise[key])] * len(seconds)
        for key, seconds in after.items()
        if key in otherwise
    ]
    return max(0.0, statistics.median(itertools.chain(*more))) if more else 0.0
