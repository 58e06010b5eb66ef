"""Measures step times, and two sets of buckets against each other, by replays.

Every replay warms up first. What is compared runs by turns in one engine, in another order every
time, so that a slow moment of the machine does not meet the same sizes again.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.tuner import MeasuredTimes
from rbln_backend.bucketing.usage import PHASES
from rbln_backend.errors import BucketError
from rbln_backend.scheduler.simulator import Request, Tables
from server.tuning.replayer import Replayer, ReplayResult, Round, Step
from server.tuning.step_times import bucket_seconds, ran_of, row_seconds, times_in_trace

Counts = Mapping[str, Mapping[int, int]]
"""Steps by phase and size."""

# How often a round runs, and of a size how many steps in it.
_REPEATS = 8
_STEPS = 12
_PROMPT_TOKENS = 32
# Sizes that run in the largest bucket, to tell what a real row takes more than a padded one.
_SPREAD = 6
# Of a record's sizes: enough to stand for all, few enough for a large model.
_MOST_COMPARED = 16
# Divisions of the buckets into halves, each a set to replay a trace with.
_DIVISIONS = 4
# How often the present buckets are among the sets: half of all steps that are predicted are theirs.
_PRESENT = 2


def measure_alone(
    replayer: Replayer, tables: Tables
) -> tuple[dict[str, MeasuredTimes], ReplayResult]:
    """Return step times by phase over all buckets, and what the engine says of itself.

    Raises `ChildError`, and `BucketError` where the model's context is too short for a bucket.
    """
    largest = {phase: BucketTable((tables[phase].largest,)) for phase in PHASES}
    spread = {phase: _spread(tables[phase]) for phase in PHASES}
    rounds = [Round(requests, tables) for requests in _periods_of(tables)]
    count = len(rounds)
    rounds += [Round(requests, largest) for requests in _periods_of(spread)]
    shuffled = random.Random(0)
    order = [
        index
        for _ in range(_REPEATS + 1)
        for index in shuffled.sample(range(len(rounds)), len(rounds))
    ]
    found = replayer.run("measuring", rounds, order, warm_up=len(rounds))
    full = ran_of(rounds[:count], found.ran[:count])
    padded = ran_of(rounds[count:], found.ran[count:])
    times = {}
    for phase, table in tables.items():
        seconds = bucket_seconds(full[phase])
        if table.largest not in seconds:
            raise BucketError(
                f"No step of the {phase} bucket {table.largest} ran: the engine's max_model_len of "
                f"{found.max_model_len} is too short for it; say smaller --{phase}-buckets"
            )
        # Other sizes ran on the way to these, between chunks of prompts: in colder caches.
        meant = {key: taken for key, taken in padded[phase].items() if key[1] in spread[phase]}
        times[phase] = MeasuredTimes(seconds, row_seconds(meant))
    return times, found


def measure_trace(
    replayer: Replayer,
    tables: Tables,
    present: Tables,
    periods: Sequence[Sequence[Request]],
    alone: Mapping[str, MeasuredTimes],
) -> dict[str, MeasuredTimes]:
    """Return step times by phase from replays with half of the buckets each, or with the present.

    Raises `ChildError`.
    """
    sets = [*_halves(tables), *[present] * _PRESENT]
    rounds = [Round(period, chosen) for period in periods for chosen in sets]
    # Each period with each set, and at any time all of the sets: a slow moment meets them alike.
    order = [
        len(sets) * number + (repeat + number) % len(sets)
        for repeat in range(-1, len(sets))
        for number in range(len(periods))
    ]
    found = replayer.run("measuring the trace", rounds, order, warm_up=len(periods))
    ran = ran_of(rounds, found.ran, in_trace=True)
    return {phase: times_in_trace(ran[phase], alone[phase]) for phase in PHASES}


def compare_trace(
    replayer: Replayer, sets: Sequence[Tables], periods: Sequence[Sequence[Request]]
) -> list[float]:
    """Return the seconds of all steps of the trace with either set. Raises `ChildError`.

    A step counts as the median of its repeats, so that what interrupts one counts for nothing.
    """
    return [
        sum(
            statistics.median(step.seconds for step in same)
            for repeats in ran
            for same in zip(*repeats, strict=True)
        )
        for _, ran in _by_turns(replayer, sets, periods)
    ]


def compare_sizes(replayer: Replayer, sets: Sequence[Tables], counts: Counts) -> list[float]:
    """Return the seconds of all steps of `counts` with either set. Raises `ChildError`."""
    few = {phase: _few(counts[phase]) for phase in PHASES}
    turns = _by_turns(replayer, sets, list(_periods_of(few)))
    seconds = []
    for tables, (rounds, ran) in zip(sets, turns, strict=True):
        found = ran_of(rounds, ran)
        taken = (
            count * statistics.median(found[phase].get((tables[phase].find(size), size), [0.0]))
            for phase in PHASES
            for size, count in few[phase].items()
        )
        seconds.append(sum(taken))
    return seconds


def _by_turns(
    replayer: Replayer, sets: Sequence[Tables], periods: Sequence[Sequence[Request]]
) -> Iterator[tuple[list[Round], list[list[list[Step]]]]]:
    """Run each period with one set and right after it with the other; yields what ran of a set."""
    rounds = [Round(period, tables) for period in periods for tables in sets]
    order = [
        # Neither is always the first.
        2 * number + (which ^ (number + repeat) % 2)
        for repeat in range(_REPEATS + 1)
        for number in range(len(periods))
        for which in (0, 1)
    ]
    found = replayer.run("comparing", rounds, order, warm_up=len(rounds))
    for which in (0, 1):
        yield rounds[which::2], found.ran[which::2]


def _few(counts: Mapping[int, int]) -> dict[int, int]:
    """The sizes that ran most, which stand for the others in proportion."""
    most = sorted(counts, key=lambda size: (-counts[size], size))[:_MOST_COMPARED]
    share = sum(counts.values()) / max(sum(counts[size] for size in most), 1)
    return {size: round(counts[size] * share) for size in sorted(most)}


def _periods_of(sizes: Mapping[str, Iterable[int]]) -> Iterator[list[Request]]:
    """Requests whose steps are of each size; a chunk of one token never runs."""
    for rows in sizes["decode"]:
        # Later prompts run in between: the first requests have to outlast them.
        yield [Request(0, _PROMPT_TOKENS, 2 * rows + _STEPS)] * rows
    for tokens in sizes["prefill"]:
        if tokens > 1:
            yield [Request(0, tokens, 1)] * (_STEPS // 3)


def _spread(table: BucketTable) -> list[int]:
    """A few of the sizes, over all of their range."""
    sizes = [size for size in table if size > 1]
    return sorted({*sizes[:: max(1, len(sizes) // _SPREAD)], table.largest})


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
