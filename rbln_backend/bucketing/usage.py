"""Counts of steps by size: input of the tuner.

They are recorded in a file across restarts, one for each engine configuration. Several servers may
share it: each adds its new counts under a lock, and replaces the file atomically. An unreadable
file is renamed and replaced by a new one.

Counts can also be read from the log that vLLM and this server write with
VLLM_LOG_BATCHSIZE_INTERVAL. A line holds counts by step size and median times in milliseconds since
the process began, so the last line of a process suffices. vLLM up to 0.7 logs no times. Only this
server logs prefill steps apart; for vLLM, sizes that fit into a decode batch count as decode
batches.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from rbln_backend.bucketing.buckets import BucketTable
from rbln_backend.host.file_locks import locked_file
from rbln_backend.host.replaced_files import replace_file

PHASES = ("prefill", "decode")


@dataclass(slots=True)
class PhaseUsage:
    """Steps of one phase by their real size, and by the bucket that they ran in.

    Sizes are tokens in prefill and rows in decode.
    """

    steps_by_size: dict[int, int] = field(default_factory=dict)
    steps_by_bucket: dict[int, int] = field(default_factory=dict)
    seconds_by_bucket: dict[int, float] = field(default_factory=dict)

    def note(self, size: int, bucket: int, seconds: float, steps: int = 1) -> None:
        """Count `steps` of this size, which took `seconds` in total."""
        sizes, buckets, times = self.steps_by_size, self.steps_by_bucket, self.seconds_by_bucket
        sizes[size] = sizes.get(size, 0) + steps
        buckets[bucket] = buckets.get(bucket, 0) + steps
        times[bucket] = times.get(bucket, 0.0) + seconds

    def add(self, other: PhaseUsage) -> None:
        """Add the counts of another record."""
        _add(self.steps_by_size, other.steps_by_size)
        _add(self.steps_by_bucket, other.steps_by_bucket)
        _add(self.seconds_by_bucket, other.seconds_by_bucket)

    @property
    def steps(self) -> int:
        """Number of counted steps."""
        return sum(self.steps_by_size.values())

    @property
    def seconds(self) -> float:
        """Total seconds of the steps."""
        return sum(self.seconds_by_bucket.values())

    @property
    def padded(self) -> int:
        """Computed rows, or tokens, that were padding."""
        return _total(self.steps_by_bucket) - _total(self.steps_by_size)

    @property
    def padding(self) -> float:
        """Share of padding in all computed rows, or tokens; 0 without steps."""
        return self.padded / max(_total(self.steps_by_bucket), 1)

    def mean_seconds(self, least_steps: int = 1) -> dict[int, float]:
        """Return the mean seconds of a step by bucket, for buckets with at least `least_steps`."""
        ran = self.steps_by_bucket.items()
        return {b: self.seconds_by_bucket[b] / steps for b, steps in ran if steps >= least_steps}


@dataclass(slots=True)
class Usage:
    """Steps by phase; `about` describes the engine, see `about_engine`."""

    phases: dict[str, PhaseUsage] = field(
        default_factory=lambda: {phase: PhaseUsage() for phase in PHASES}
    )
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Number of counted steps."""
        return sum(usage.steps for usage in self.phases.values())

    def add(self, other: Usage) -> None:
        """Add the counts of another record, and take its description if it has one."""
        self.about = other.about or self.about
        for phase, usage in other.phases.items():
            self.phases[phase].add(usage)


def about_engine(
    model: str, device: str, *, decode_buckets: Sequence[int], prefill_buckets: Sequence[int]
) -> dict[str, Any]:
    """Return the description of an engine: served model, device and current buckets."""
    buckets = {"decode_buckets": list(decode_buckets), "prefill_buckets": list(prefill_buckets)}
    return {"model": model, "device": device, **buckets}


class _Content(msgspec.Struct):
    """Content of a file."""

    format: Literal[1]
    about: dict[str, Any]
    prefill: PhaseUsage
    decode: PhaseUsage


class UsageFile:
    """The record of one engine configuration."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Usage:
        """Return the record, empty without a file. Raises `ValueError` or `OSError`."""
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return Usage()
        except RecursionError as error:
            raise ValueError(f"it is nested too deeply: {error}") from None
        return Usage({"prefill": found.prefill, "decode": found.decode}, found.about)

    def add(self, counted: Usage) -> None:
        """Add to the file. Raises `OSError` if it cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked_file(self.path.with_suffix(".lock")):
            try:
                total = self.read()
            except ValueError:
                self.path.replace(self.path.with_suffix(".damaged"))
                total = Usage()
            total.add(counted)
            content = _Content(1, total.about, **total.phases)
            replace_file(self.path, msgspec.json.encode(content))


def _add(into: dict[int, Any], more: Mapping[int, Any]) -> None:
    for key, value in more.items():
        into[key] = into.get(key, 0) + value


def _total(steps_by: Mapping[int, int]) -> int:
    return sum(size * steps for size, steps in steps_by.items())


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
