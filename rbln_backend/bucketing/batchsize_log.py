"""Reader of the log that vLLM and this server write with VLLM_LOG_BATCHSIZE_INTERVAL.

A line holds counts by step size and median times in milliseconds since the process began, so the
last line of a process suffices. vLLM up to 0.7 logs no times. Only this server logs prefill steps
apart; for vLLM, sizes that fit into a decode batch count as decode batches.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Mapping
from pathlib import Path

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.usage import PhaseUsage, Usage

_LIST = r"\[[^\]]*\]"
_LINE = re.compile(
    r"(?:\((?P<process>\w+ pid=\d+)\))?.*Batchsize (?:"
    rf"distribution \(batchsize, count\): (?P<counts>{_LIST})|"
    rf"forward time stats \(batchsize, count, median_time\(ms\)\): (?P<stats>{_LIST})"
    rf"(?: decode, (?P<prefill>{_LIST}) prefill)?)"
)


Tables = Mapping[str, BucketTable]
"""Buckets by phase."""
Steps = list[tuple[int, int, float | None]]
"""Size, number of steps, and median milliseconds, None if not logged."""


def read_log(path: Path, tables: Tables) -> Usage:
    """Return the logged steps; `tables` are the buckets of this server.

    Raises `OSError`, `BucketError` for a size above all buckets, and `ValueError` for a log
    without sizes.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = [found for line in file if (found := _LINE.search(line))]
    usage = Usage()
    for found in {found["process"]: found for found in lines}.values():
        steps = _read(found["stats"] or found["counts"], path)
        if found["prefill"] is None:
            _count_foreign(usage, tables, steps)
            continue
        for phase, ran in (("decode", steps), ("prefill", _read(found["prefill"], path))):
            for size, count, ms in ran:
                _count(usage.phases[phase], size, tables[phase].find(size), count, ms)
    if not usage.steps:
        raise ValueError(
            f"{path} has no batch sizes; run the server with VLLM_LOG_BATCHSIZE_INTERVAL=60"
        )
    return usage


def _count_foreign(usage: Usage, tables: Tables, steps: Steps) -> None:
    decode, chunk = tables["decode"].largest, tables["prefill"].largest
    for size, count, ms in steps:
        phase = usage.phases["decode" if size <= decode else "prefill"]
        if size <= max(decode, chunk):
            # A step of vLLM had no bucket: its time is that of its own size.
            _count(phase, size, size, count, ms)
            continue
        # Here the step would run as several chunks, whose times are unknown.
        full, rest = divmod(size, chunk)
        _count(phase, chunk, chunk, full * count)
        if rest > 1:
            _count(phase, rest, rest, count)


def _count(phase: PhaseUsage, size: int, bucket: int, count: int, ms: float | None = None) -> None:
    if ms is None:
        phase.add(PhaseUsage({size: count}))
    else:
        phase.note(size, bucket, count * ms / 1000.0, count)


def _read(text: str, path: Path) -> Steps:
    try:
        return [
            (int(size), int(count), float(ms[0]) if ms else None)
            for size, count, *ms in literal_eval(text)
        ]
    except (ValueError, TypeError, SyntaxError) as error:
        raise ValueError(f"{path}: cannot read {text[:80]!r}: {error}") from error
