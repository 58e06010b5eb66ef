"""Measurement of step times, and comparison of two sets of buckets, by replays.

Compared sets run alternately in one engine, so that slow periods of the machine affect all of them.
A step counts with the median of its repeats, which removes interruptions.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median

from rbln_backend.bucketing.step_times import MeasuredTimes
from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.usage import PHASES
from rbln_backend.errors import BucketError
from server.tuning.replay import Player, ReplayRound, Step
from server.tuning.search import LEAST_STEPS
from server.tuning.simulator import Request, Tables

Ran = Mapping[tuple[int, int], Sequence[float]]
"""Seconds of each step of one phase by its bucket and size."""
Periods = Sequence[Sequence[Request]]

# Repeats of a round, and tokens of its prompts.
_REPEATS = 8
_PROMPT_TOKENS = 32
# Least number of sizes that run in the largest bucket, to measure the cost of a real row.
_SPREAD = 6
# Compared sizes of a record: enough to represent all, few enough for a large model.
_MOST_COMPARED = 16
# Divisions of the buckets into halves; a trace is replayed with each half. The current buckets are
# replayed twice: half of all predicted steps are theirs.
_DIVISIONS = 4


def measure_alone(player: Player, tables: Tables) -> dict[str, MeasuredTimes]:
    """Return step times by phase over all buckets.

    Raises `BucketError` where the model's context is too short for a bucket.
    """
    largest = {phase: BucketTable((tables[phase].largest,)) for phase in PHASES}
    spread = {p: {*t.sizes[:: -max(1, len(t) // _SPREAD)]} for p, t in tables.items()}
    full = [[ReplayRound(period, tables)] for period in periods_of(tables)]
    padded = [[ReplayRound(period, largest)] for period in periods_of(spread)]
    found = list(_ran(player, "step times", [*full, *padded], _REPEATS))
    times = {}
    for phase, table in tables.items():
        seconds = bucket_seconds(ran_of(found[: len(full)])[phase])
        if table.largest not in seconds:
            raise BucketError(
                f"No step of the {phase} bucket {table.largest} ran: the engine's max_model_len of "
                f"{player.max_model_len} is too short for it; say smaller --{phase}-buckets"
            )
        # Other sizes also ran between chunks of prompts, in colder caches.
        ran = ran_of(found[len(full) :])[phase]
        meant = {key: taken for key, taken in ran.items() if key[1] in spread[phase]}
        times[phase] = MeasuredTimes(seconds, row_seconds(meant))
    return times


def measure_trace(
    player: Player,
    tables: Tables,
    present: Tables,
    periods: Periods,
    alone: Mapping[str, MeasuredTimes],
) -> dict[str, MeasuredTimes]:
    """Return step times by phase from replays with halves of the buckets and the current ones."""
    sets = [*_halves(tables), present, present]
    groups = [[ReplayRound(period, chosen) for chosen in sets] for period in periods]
    ran = ran_of(_ran(player, "within the trace", groups, 1), in_trace=True)
    return {phase: times_in_trace(ran[phase], alone[phase]) for phase in PHASES}


def compare_trace(player: Player, sets: Sequence[Tables], periods: Periods) -> list[float]:
    """Return the seconds of all steps of the trace with each set."""
    ran = _compared(player, sets, periods)
    return [sum(itertools.chain(*taken.values())) for taken in ran]


def compare_sizes(
    player: Player, sets: Sequence[Tables], counts: Mapping[str, Mapping[int, int]]
) -> list[float]:
    """Return the seconds of the steps of `counts`, by phase and size, with each set.

    The most frequent sizes represent the others in proportion.
    """
    few = {p: sorted(counts[p], key=lambda n: -counts[p][n])[:_MOST_COMPARED] for p in PHASES}
    share = {p: sum(counts[p].values()) / max(sum(counts[p][n] for n in few[p]), 1) for p in PHASES}
    return [
        sum(
            share[phase] * counts[phase][size] * median(taken)
            for (phase, size), taken in ran.items()
            if size in few[phase]
        )
        for ran in _compared(player, sets, list(periods_of(few)))
    ]


def periods_of(sizes: Mapping[str, Iterable[int]]) -> Iterator[list[Request]]:
    """Yield requests whose steps have each size; a chunk of one token never runs."""
    for rows in sizes["decode"]:
        # Later prompts run in between: the first requests have to outlast them.
        yield [Request(0, _PROMPT_TOKENS, 2 * rows + LEAST_STEPS)] * rows
    for tokens in sizes["prefill"]:
        if tokens > 1:
            yield [Request(0, tokens, 1)] * (LEAST_STEPS // 3)


def ran_of(
    ran: Iterable[tuple[Tables, Sequence[Sequence[Step]]]], *, in_trace: bool = False
) -> dict[str, Ran]:
    """Return seconds by phase, bucket and size of the steps that `ran`.

    In a trace, the extra time of a decode step after a chunk, in colder caches, counts for the
    chunk.
    """
    apart: dict[str, dict[tuple[int, int], list[float]]]
    apart = {phase: defaultdict(list) for phase in PHASES}
    beside = {phase: defaultdict[tuple[int, int], list[float]](list) for phase in PHASES}
    for tables, steps in ((tables, steps) for tables, repeats in ran for steps in repeats):
        phases = ["", *(step.phase for step in steps), ""]
        for before, step, following in zip(phases, steps, phases[2:], strict=False):
            meets = following == "decode" if step.phase == "prefill" else before == "prefill"
            key = tables[step.phase].find(step.size), step.size
            (beside if meets else apart)[step.phase][key].append(step.seconds)
    delay = _delay(beside["decode"], apart["decode"]) if in_trace else 0.0
    for phase, change in (("decode", -delay), ("prefill", delay)):
        for key, taken in beside[phase].items():
            apart[phase][key] += (seconds + change for seconds in taken)
    return {**apart}


def bucket_seconds(ran: Ran, row: float = 0.0, least: int = 1) -> dict[int, float]:
    """Return the median seconds of full buckets that ran at least `least` times.

    A padded row counts as `row` seconds faster than a real one.
    """
    found: dict[int, list[float]] = defaultdict(list)
    for (bucket, size), taken in ran.items():
        found[bucket] += (seconds + row * (bucket - size) for seconds in taken)
    return {bucket: median(taken) for bucket, taken in found.items() if len(taken) >= least}


def row_seconds(ran: Ran, otherwise: float = 0.0) -> float:
    """Return the seconds of one more real row in the same bucket, at least 0.

    This is the slope over all buckets with several sizes; `otherwise` without such a bucket.
    """
    by_bucket: dict[int, list[tuple[int, float, int]]] = defaultdict(list)
    for (bucket, size), taken in ran.items():
        by_bucket[bucket].append((size, median(taken), len(taken)))
    rise = spread = 0.0
    for found in by_bucket.values():
        middle = fmean([size for size, _, _ in found], [n for _, _, n in found])
        rise += sum(n * (size - middle) * seconds for size, seconds, n in found)
        spread += sum(n * (size - middle) ** 2 for size, _, n in found)
    return max(0.0, rise / spread) if spread else otherwise


def times_in_trace(ran: Ran, alone: MeasuredTimes) -> MeasuredTimes:
    """Return the times of one phase within a trace.

    A bucket with too few steps takes its time `alone`, scaled by the median ratio of the others.
    """
    row = row_seconds(ran, alone.row)
    full = bucket_seconds(ran, row, LEAST_STEPS)
    if not full:
        return alone
    more = median(seconds / alone.of(bucket, bucket) for bucket, seconds in full.items())
    often = {key: median(taken) for key, taken in ran.items() if len(taken) >= LEAST_STEPS}
    return MeasuredTimes({b: more * s for b, s in alone.full.items()} | full, row, often)


def _compared(
    player: Player, sets: Sequence[Tables], periods: Periods
) -> list[dict[tuple[str, int], list[float]]]:
    """Return for each set the seconds of every step by phase and size, medians of repeats."""
    found: list[dict[tuple[str, int], list[float]]] = [defaultdict(list) for _ in sets]
    groups = [[ReplayRound(period, tables) for tables in sets] for period in periods]
    for (_, which), repeats in player.run("comparing", groups, _REPEATS).items():
        for same in zip(*repeats, strict=True):
            taken = median(step.seconds for step in same)
            found[which][same[0].phase, same[0].size].append(taken)
    return found


def _ran(
    player: Player, what: str, groups: Sequence[Sequence[ReplayRound]], repeats: int
) -> Iterator[tuple[Tables, Sequence[Sequence[Step]]]]:
    """Yield the buckets of each round, and its steps of every repeat."""
    for (n, which), steps in player.run(what, groups, repeats).items():
        yield groups[n][which].tables, steps


def _delay(after: Ran, otherwise: Ran) -> float:
    """Return the median extra seconds of a decode step after a chunk, over sizes with both."""
    more = [
        [median(taken) - median(otherwise[key])] * len(taken)
        for key, taken in after.items()
        if key in otherwise
    ]
    return max(0.0, median(itertools.chain(*more))) if more else 0.0


def _halves(tables: Tables) -> Iterator[Tables]:
    """Yield both halves of each division of the buckets; the largest bucket is in every half.

    Divisions are random, so that most buckets run the sizes right below them.
    """
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
