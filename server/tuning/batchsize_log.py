"""Sizes of steps from the log that vLLM and this server write with VLLM_LOG_BATCHSIZE_INTERVAL.

A line holds, for every number of tokens that a step had, how often it ran and its median time in
milliseconds, since the process began; so the last line of a process says all. vLLM up to 0.7 told
no times. Only this server says which steps were prefills: of others, sizes that fit into a decode
batch are taken for decode batches.
"""

from __future__ import annotations

import re
from ast import literal_eval
from pathlib import Path
from typing import NamedTuple

from rbln_backend.bucketing.usage import PhaseUsage, Usage
from rbln_backend.scheduler.simulator import Tables

_LIST = r"\[[^\]]*\]"
_LINE = re.compile(
    r"(?:\((?P<process>\w+ pid=\d+)\))?.*Batchsize (?:"
    rf"distribution \(batchsize, count\): (?P<counts>{_LIST})|"
    rf"forward time stats \(batchsize, count, median_time\(ms\)\): (?P<stats>{_LIST})"
    rf"(?: decode, (?P<prefill>{_LIST}) prefill)?)"
)


class _Ran(NamedTuple):
    """Steps of one size, and what one took, where that is told."""

    size: int
    steps: int
    median_ms: float | None = None


def read_log(path: Path, tables: Tables) -> Usage:
    """Return what the log tells; steps of this server ran in the buckets of `tables`.

    Raises `OSError`, `BucketError` where none of them holds such a step, and `ValueError` where
    nothing is told.
    """
    last: dict[str, re.Match[str]] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if (found := _LINE.search(line)) is not None:
                last[found["process"] or ""] = found
    usage = Usage()
    for found in last.values():
        if found["prefill"] is None:
            for ran in _read(found["stats"] or found["counts"], path):
                _count_foreign(usage, tables, ran)
        else:
            for phase, text in (("decode", found["stats"]), ("prefill", found["prefill"])):
                for ran in _read(text, path):
                    _count(usage.phases[phase], ran, tables[phase].find(ran.size))
    if not usage.steps:
        raise ValueError(
            f"{path} tells no batch sizes; run the server with VLLM_LOG_BATCHSIZE_INTERVAL=60"
        )
    return usage


def _count_foreign(usage: Usage, tables: Tables, ran: _Ran) -> None:
    decode, chunk = tables["decode"].largest, tables["prefill"].largest
    phase = usage.phases["decode" if ran.size <= decode else "prefill"]
    if ran.size <= max(decode, chunk):
        # A step that ran elsewhere had no bucket: its own size is what its time is of.
        _count(phase, ran, ran.size)
        return
    # It runs here as several chunks, and its time is that of none of them.
    full, rest = divmod(ran.size, chunk)
    phase.add(PhaseUsage({chunk: full * ran.steps}))
    phase.add(PhaseUsage({rest: ran.steps} if rest > 1 else {}))


def _count(phase: PhaseUsage, ran: _Ran, bucket: int) -> None:
    if ran.median_ms is None:
        phase.add(PhaseUsage({ran.size: ran.steps}))
    else:
        phase.note(ran.size, bucket, ran.steps * ran.median_ms / 1000.0, ran.steps)


def _read(text: str, path: Path) -> list[_Ran]:
    try:
        return [
            _Ran(int(size), int(steps), *map(float, ms)) for size, steps, *ms in literal_eval(text)
        ]
    except (ValueError, TypeError, SyntaxError) as error:
        raise ValueError(f"{path}: cannot read {text[:80]!r}: {error}") from error
