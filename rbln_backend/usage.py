"""Counts of steps by size, and the buckets with which recorded steps would take the least time.

Counts are recorded in a file across restarts, one for each engine configuration. Several servers
may share it: each adds its new counts under a lock, and replaces the file atomically. An unreadable
file is renamed and replaced by a new one.

They can also be read from the log that vLLM and this server write with VLLM_LOG_BATCHSIZE_INTERVAL.
A line holds counts by step size and median times in milliseconds since the process began, so the
last line of a process suffices. vLLM up to 0.7 logs no times. Only this server logs prefill steps
apart; for vLLM, sizes that fit into a decode batch count as decode batches.
"""

from __future__ import annotations

import math
import re
from ast import literal_eval
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import msgspec

from rbln_backend.buckets import BucketTable
from rbln_backend.errors import BucketError
from rbln_backend.host.files import locked_file, replace_file

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
        _add(self.steps_by_size, other.steps_by_size)
        _add(self.steps_by_bucket, other.steps_by_bucket)
        _add(self.seconds_by_bucket, other.seconds_by_bucket)

    @property
    def steps(self) -> int:
        """Number of counted steps."""
        return sum(self.steps_by_size.values())

    @property
    def seconds(self) -> float:
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


class StepTimes:
    """Seconds of a step by its bucket, interpolated from the mean times of some buckets.

    Linear between recorded buckets and beyond, and never less for a larger bucket. A bucket below
    all recorded ones takes at least its share of the smallest one's time. With a single recorded
    bucket, smaller ones take the same time. Without any, a step takes as many seconds as
    it has rows, so that the least padding is best.
    """

    def __init__(self, recorded: Mapping[int, float]) -> None:
        self._sizes = sorted(recorded)
        # The mean of a rarely used bucket may be too small.
        self._seconds = list(accumulate((recorded[size] for size in self._sizes), max))

    def of(self, bucket: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return float(bucket)
        if len(sizes) == 1:
            return seconds[0] * max(bucket / sizes[0], 1.0)
        right = min(max(bisect_left(sizes, bucket), 1), len(sizes) - 1)
        span = sizes[right] - sizes[right - 1]
        slope = (seconds[right] - seconds[right - 1]) / span
        taken = seconds[right - 1] + slope * (bucket - sizes[right - 1])
        # A line through two larger buckets may fall below zero.
        return max(taken, seconds[0] * bucket / sizes[0]) if bucket < sizes[0] else taken


LIMITS = {"prefill": 6, "decode": 32}
"""Default limit of suggested graphs by phase."""
NOISE = 0.05
"""Share by which recorded step times of a bucket vary from day to day (docs/tuning.md)."""
LEAST_STEPS = 12
"""Steps that a bucket needs for its mean time to count."""


@dataclass(frozen=True, slots=True)
class Change:
    """Current and suggested buckets of a phase, with the usage under each."""

    current: BucketTable
    suggested: BucketTable
    now: PhaseUsage
    then: PhaseUsage

    @property
    def saving(self) -> float:
        return 1.0 - self.then.seconds / self.now.seconds if self.now.seconds > 0 else 0.0

    def report(self) -> dict[str, Any]:
        return {
            "steps": self.now.steps,
            "current": list(self.current),
            "suggested": list(self.suggested),
            "padding_now": round(self.now.padding, 4),
            "padding_then": round(self.then.padding, 4),
        }


def suggest(
    counts: Mapping[int, int], times: StepTimes, current: BucketTable, limit: int
) -> Change:
    """Return the set of at most `limit` buckets with the least seconds for steps counted by size.

    The largest current bucket always stays; others stay within the limit if steps would use them
    at no cost. Raises `BucketError` when a size does not fit or `limit` is not positive.
    """
    if limit < 1:
        raise BucketError(f"The number of buckets must be greater than 0, got {limit}")
    if counts and not 1 <= min(counts) <= max(counts) <= current.largest:
        raise BucketError(
            f"Recorded sizes {min(counts)} to {max(counts)} do not fit into buckets up to "
            f"{current.largest}"
        )
    best = _cheapest(counts, times, current.largest, limit)
    # Current buckets that steps would use, within the limit: a smaller bucket costs nothing, and
    # each change of sizes compiles graphs.
    for bucket in current:
        more = BucketTable(tuple(sorted({*best, bucket})))
        if len(more) <= limit and bucket in ran_in(more, counts, times).steps_by_bucket:
            best = more
    return Change(current, best, ran_in(current, counts, times), ran_in(best, counts, times))


def ran_in(table: BucketTable, counts: Mapping[int, int], times: StepTimes) -> PhaseUsage:
    """Return the usage of the steps in `counts`, by size, in the buckets of `table`."""
    usage = PhaseUsage()
    for size, steps in counts.items():
        bucket = table.find(size)
        usage.note(size, bucket, steps * times.of(bucket), steps)
    return usage


def advise(usage: Usage) -> dict[str, Any]:
    """Return the current and the suggested sizes by phase, and the predicted saving.

    `saving` is a share of the step time, 0 to 1, predicted from mean step times. If it is less than
    `noise`, the current sizes are suggested: `NOISE`, or the relative error of the predicted
    current time if larger. A phase without fitting records is null.
    """
    return {phase: _advise(usage, phase) for phase in PHASES}


def fitting(counts: Mapping[int, int], table: BucketTable) -> dict[int, int]:
    """Return the steps by size without sizes that are too large for `table`."""
    return {size: steps for size, steps in counts.items() if size <= table.largest}


def _advise(usage: Usage, phase: str) -> dict[str, Any] | None:
    recorded, sizes = usage.phases[phase], usage.about.get(f"{phase}_buckets")
    counts = fitting(recorded.steps_by_size, BucketTable(tuple(sizes))) if sizes else {}
    if not sizes or not counts:
        return None
    table, times = BucketTable(tuple(sizes)), StepTimes(recorded.mean_seconds(LEAST_STEPS))
    found = suggest(counts, times, table, max(LIMITS[phase], len(table)))
    modelled = sum(times.of(b) * steps for b, steps in recorded.steps_by_bucket.items())
    noise = max(NOISE, abs(modelled - recorded.seconds) / recorded.seconds)
    if found.saving < noise:
        found = Change(table, table, found.now, found.now)
    return {
        **found.report(),
        "saving": round(found.saving, 4),
        "noise": round(noise, 4),
        "setting": _SETTINGS[phase].format(sizes=list(found.suggested)),
    }


_SETTINGS = {
    "prefill": '--additional-config \'{{"rbln": {{"prefill_chunk_buckets": {sizes}}}}}\'',
    "decode": '--additional-config \'{{"rbln": {{"decode_batch_bucket_strategy": "manual", '
    '"decode_batch_bucket_manual_buckets": {sizes}}}}}\'',
}


def _cheapest(counts: Mapping[int, int], times: StepTimes, largest: int, limit: int) -> BucketTable:
    """Return the set with the least seconds; it has `largest`."""
    costs = {size: times.of(size) for size in {*counts, largest}}
    # Drop buckets that take as long as a larger one, so that seconds rise with the size.
    useful = [largest]
    for size in sorted((size for size in costs if size < largest), reverse=True):
        useful += [size] if costs[size] < costs[useful[-1]] else []
    useful.reverse()
    wanted = Counter[int]()
    for size, count in counts.items():
        wanted[useful[bisect_left(useful, size)]] += count
    path = _cheapest_path(
        [wanted[size] for size in useful], [costs[size] for size in useful], limit
    )
    return BucketTable(tuple(useful[index] for index in path))


def _cheapest_path(counts: Sequence[int], seconds: Sequence[float], limit: int) -> list[int]:
    """Return the indices of the sizes that are buckets, ascending; the last size is one.

    Dynamic programming over the number of buckets, with divide and conquer: seconds rise with the
    size, so the cost fulfils the quadrangle inequality, and the best bucket before the middle size
    bounds those of either half. Takes O(limit * n log n) for n sizes.
    """
    up_to = [0, *accumulate(counts)]
    # By size: the least cost of the steps up to it with it as the last bucket, and the path.
    found = [(up_to[end + 1] * seconds[end], [end]) for end in range(len(counts))]
    for _ in range(1, min(limit, len(counts))):
        better = list(found)
        halves = [(1, len(counts) - 1, 0, len(counts) - 2)]
        while halves:
            first, last, low, high = halves.pop()
            end = (first + last) // 2
            total, best = min(
                (found[index][0] + (up_to[end + 1] - up_to[index + 1]) * seconds[end], index)
                for index in range(low, min(end - 1, high) + 1)
            )
            # Fewer buckets win a tie: each is a graph to compile and to store.
            if total < found[end][0] and not math.isclose(total, found[end][0]):
                better[end] = total, [*found[best][1], end]
            halves += [(first, end - 1, low, best)] if first < end else []
            halves += [(end + 1, last, best, high)] if end < last else []
        found = better
    return found[-1][1]
