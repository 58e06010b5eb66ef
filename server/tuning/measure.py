"""Measures step times on an engine of its own.

Seconds are wall time of whole steps, the scheduler and sampling included: what a request waits for.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.tuner import MeasuredTimes
from rbln_backend.bucketing.usage import PHASES
from rbln_backend.errors import BucketError
from rbln_backend.reporting.child_process import ChildJob
from rbln_backend.settings import child_environ
from server.tuning.replay_job import ReplayJob, ReplayResult, Request, Round, Step

Tables = Mapping[str, BucketTable]
"""Buckets by phase."""

# Steps of a size in a pass, and passes.
_STEPS = 12
_PASSES = 8
# Sizes that run in the largest bucket, to tell what a real row takes more than a padded one.
_SPREAD = 6
_PROMPT_TOKENS = 32
_TRIED = ("decode_batch_bucket", "prefill_chunk_buckets")


@dataclass(frozen=True, slots=True)
class Replayer:
    """Runs rounds on engines that MODEL and vLLM's flags describe, each in its own process."""

    argv: tuple[str, ...]
    timeout_s: float

    def __post_init__(self) -> None:
        """Raises `ValueError` where the flags name sizes, which are what is tried here."""
        _with_buckets(self.argv, {phase: BucketTable((1,)) for phase in PHASES})

    def run(self, label: str, tables: Tables, rounds: Sequence[Round]) -> ReplayResult:
        """Return the steps of `rounds`, whose buckets are among `tables`. Raises `ChildError`."""
        child = ChildJob(
            label=label,
            module="server.tuning.replay",
            variables=child_environ(
                settings=True,
                VLLM_NO_USAGE_STATS="1",
                VLLM_PLUGINS="rbln",
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
            ),
            timeout=self.timeout_s,
        )
        job = ReplayJob(argv=_with_buckets(self.argv, tables), rounds=tuple(rounds))
        return child.run(job.write, ReplayResult.read)


def measure_times(
    replayer: Replayer, tables: Tables
) -> tuple[dict[str, MeasuredTimes], dict[str, Any]]:
    """Return step times by phase over all buckets, and what the engine says of itself.

    Raises `ChildError`, and `BucketError` where the model's context is too short for a bucket.
    """
    largest = {phase: BucketTable((tables[phase].largest,)) for phase in PHASES}
    full = rounds_of(tables, tables)
    spread = {phase: _spread(tables[phase]) for phase in PHASES}
    padded = rounds_of(largest, spread)
    ran, about = run_passes(replayer, "measuring", tables, full + padded)
    by_bucket = median_seconds(itertools.chain(*ran[: len(full)]), tables)
    by_size = median_seconds(itertools.chain(*ran[len(full) :]))
    times = {}
    for phase, table in tables.items():
        if table.largest not in by_bucket[phase]:
            raise BucketError(
                f"No step of the {phase} bucket {table.largest} ran: the engine's max_model_len of "
                f"{about['max_model_len']} is too short for it; say smaller --{phase}-buckets"
            )
        # Other sizes ran on the way to these, between chunks of prompts: in colder caches.
        found = by_size[phase]
        same_bucket = {size: found[size] for size in spread[phase] if size in found}
        times[phase] = MeasuredTimes(by_bucket[phase], _row_seconds(same_bucket))
    return times, about


def sizes_of(tables: Tables) -> dict[str, tuple[int, ...]]:
    """The buckets by phase, as a round names them."""
    return {phase: tuple(tables[phase]) for phase in PHASES}


def run_passes(
    replayer: Replayer, label: str, tables: Tables, rounds: Sequence[Round]
) -> tuple[list[list[Sequence[Step]]], dict[str, Any]]:
    """Run all rounds in passes; return what each round was every time, and what the engine says.

    A first pass warms up. Each has an order of its own, so that a slow moment of the machine does
    not meet the same sizes again.
    """
    shuffled = random.Random(0)
    orders = [shuffled.sample(range(len(rounds)), len(rounds)) for _ in range(_PASSES + 1)]
    found = replayer.run(label, tables, [rounds[nth] for order in orders for nth in order])
    ran: list[list[Sequence[Step]]] = [[] for _ in rounds]
    counted = zip(itertools.chain(*orders[1:]), found.rounds[len(rounds) :], strict=True)
    for nth, steps in counted:
        ran[nth].append(steps)
    return ran, found.about


def rounds_of(tables: Tables, sizes: Mapping[str, Iterable[int]]) -> list[Round]:
    """A round in the buckets `tables` for each size; a chunk of one token never runs."""
    requests = [_decode_round(size) for size in sizes["decode"]]
    requests += [_prefill_round(size) for size in sizes["prefill"] if size > 1]
    return [Round(tuple(round_), sizes_of(tables)) for round_ in requests]


def _decode_round(rows: int) -> list[Request]:
    # Later prompts run in between: the first requests have to outlast them.
    output = 2 * rows + _STEPS
    return [Request(0, _PROMPT_TOKENS, output)] * rows


def _prefill_round(tokens: int) -> list[Request]:
    return [Request(0, tokens, 1)] * (_STEPS // 3)


def median_seconds(
    rounds: Iterable[Sequence[Step]], tables: Tables | None = None
) -> dict[str, dict[int, float]]:
    """Median seconds by phase and size, or by bucket where `tables` are given."""
    seconds: dict[str, dict[int, list[float]]] = {phase: {} for phase in PHASES}
    for step in itertools.chain(*rounds):
        size = step.size if tables is None else tables[step.phase].find(step.size)
        seconds[step.phase].setdefault(size, []).append(step.seconds)
    return {
        phase: {size: statistics.median(values) for size, values in found.items()}
        for phase, found in seconds.items()
    }


def _spread(table: BucketTable) -> list[int]:
    """A few of the sizes, over all of their range."""
    sizes = [size for size in table if size > 1]
    return sorted({*sizes[:: max(1, len(sizes) // _SPREAD)], table.largest})


def _row_seconds(by_size: Mapping[int, float]) -> float:
    """What one row more takes in the same bucket; not less than nothing."""
    if len(by_size) < 2:
        return 0.0
    return max(0.0, statistics.linear_regression(list(by_size), list(by_size.values())).slope)


def _with_buckets(argv: Sequence[str], tables: Tables) -> tuple[str, ...]:
    """Return the flags with these buckets, and without a record of what is only replayed."""
    rest, additional = _take_flag(argv, "--additional-config")
    config = json.loads(additional) if additional else {}
    given = config.get("rbln", {})
    for name in given:
        if name.startswith(_TRIED):
            raise ValueError(f"--additional-config names {name}; leave it out, it is tried here")
    for flag in ("--max-num-seqs", "--max-num-batched-tokens"):
        if _take_flag(argv, flag)[1] is not None:
            raise ValueError(f"{flag} follows from the buckets here; leave it out")
    length = _take_flag(argv, "--max-model-len")[1] or ""
    largest = tables["prefill"].largest
    if length.isdecimal() and int(length) < largest:
        raise BucketError(
            f"--max-model-len {length} is less than the prefill bucket {largest}; say "
            f"--prefill-buckets with sizes up to {length}"
        )
    ours = {
        "decode_batch_bucket_strategy": "manual",
        "decode_batch_bucket_manual_buckets": list(tables["decode"]),
        "prefill_chunk_buckets": list(tables["prefill"]),
        "record_usage": False,
    }
    return (
        *rest,
        *("--additional-config", json.dumps({**config, "rbln": {**given, **ours}})),
        *("--max-num-seqs", str(tables["decode"].largest)),
        *("--max-num-batched-tokens", str(tables["prefill"].largest)),
    )


def _take_flag(argv: Sequence[str], flag: str) -> tuple[list[str], str | None]:
    """Return the words without `flag` and its value, and the value."""
    rest, value, words = [], None, iter(argv)
    for word in words:
        name, equals, text = word.partition("=")
        if name.replace("_", "-") != flag:
            rest.append(word)
        else:
            value = text if equals else next(words, "")
    return rest, value
