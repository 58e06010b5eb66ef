"""Measures step times on an engine of its own, and what two sets of buckets really take.

Seconds are wall time of whole steps, the scheduler and sampling included: what a request waits for.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.tuner import StepTimes
from rbln_backend.bucketing.usage import PHASES
from rbln_backend.child_process import ChildJob
from rbln_backend.envs import child_environ
from server.tuning.replay_job import ReplayJob, ReplayResult, Request, Step

Tables = Mapping[str, BucketTable]
"""Buckets by phase."""

_STEPS = 24
_PROMPT_TOKENS = 32
_TRIED = ("decode_batch_bucket", "prefill_chunk_buckets")
# Enough for the steps to settle, few enough for a large model.
_MOST_MEASURED = 16


@dataclass(frozen=True, slots=True)
class Replayer:
    """Runs rounds on engines that MODEL and vLLM's flags describe, each in its own process."""

    argv: tuple[str, ...]
    timeout_s: float

    def __post_init__(self) -> None:
        """Raises `ValueError` where the flags name sizes, which are what is tried here."""
        _with_buckets(self.argv, {phase: BucketTable((1,)) for phase in PHASES})

    def run(self, label: str, tables: Tables, rounds: Sequence[Sequence[Request]]) -> ReplayResult:
        """Return the steps of `rounds`. Raises `ChildError`."""
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
        job = ReplayJob(
            argv=_with_buckets(self.argv, tables),
            rounds=tuple(tuple(requests) for requests in rounds),
        )
        return child.run(job.write, ReplayResult.read)


def measure_times(
    replayer: Replayer, tables: Tables
) -> tuple[dict[str, StepTimes], dict[str, Any]]:
    """Return step times by phase over all buckets, and what the engine says of itself."""
    rounds = [_decode_round(size) for size in tables["decode"]]
    rounds += [_prefill_round(size) for size in tables["prefill"] if size > 1]
    found = replayer.run("measuring", tables, rounds)
    seconds: dict[str, dict[int, list[float]]] = {phase: {} for phase in PHASES}
    for step in _all(found):
        bucket = tables[step.phase].find(step.size)
        seconds[step.phase].setdefault(bucket, []).append(step.seconds)
    times = {phase: StepTimes(_medians(seconds[phase])) for phase in PHASES}
    return times, found.about


def measure_sizes(
    replayer: Replayer, label: str, tables: Tables, counts: Mapping[str, Mapping[int, int]]
) -> float:
    """Return the seconds of all steps of `counts`, by phase and size, from runs at these sizes."""
    few = {phase: _few(counts[phase]) for phase in PHASES}
    rounds = [_decode_round(size) for size in few["decode"]]
    rounds += [_prefill_round(size) for size in few["prefill"] if size > 1]
    found = replayer.run(label, tables, rounds)
    seconds: dict[tuple[str, int], list[float]] = {}
    for step in _all(found):
        seconds.setdefault((step.phase, step.size), []).append(step.seconds)
    medians = _medians(seconds)
    return sum(
        count * medians.get((phase, size), 0.0)
        for phase in PHASES
        for size, count in few[phase].items()
    )


def measure_trace(
    replayer: Replayer, label: str, tables: Tables, requests: Sequence[Request], repeats: int
) -> list[list[float]]:
    """Return the seconds of every step of the trace, by repeat; a first one warms up."""
    found = replayer.run(label, tables, [requests] * (repeats + 1))
    return [[step.seconds for step in steps] for steps in found.rounds[1:]]


def _decode_round(rows: int) -> list[Request]:
    # Later prompts run in between: the first requests have to outlast them.
    output = 2 * rows + _STEPS
    return [Request(0, _PROMPT_TOKENS, output)] * rows


def _prefill_round(tokens: int) -> list[Request]:
    return [Request(0, tokens, 1)] * (_STEPS // 3)


def _few(counts: Mapping[int, int]) -> dict[int, int]:
    """The sizes that ran most, which stand for the others in proportion."""
    most = sorted(counts, key=lambda size: (-counts[size], size))[:_MOST_MEASURED]
    share = sum(counts.values()) / max(sum(counts[size] for size in most), 1)
    return {size: round(counts[size] * share) for size in sorted(most)}


def _all(result: ReplayResult) -> Iterator[Step]:
    for steps in result.rounds:
        yield from steps


def _medians(samples: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    return {key: statistics.median(values) for key, values in samples.items()}


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
