"""Figures of a comparison's records; a ratio of two figures is taken within a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from benchmarks.engines.sides import SIDE_NAMES
from benchmarks.runner.figures import SHARE, Figure
from benchmarks.runner.limits import Work
from benchmarks.runner.records import (
    HttpRecord,
    Log,
    ModelRecord,
    StartRecord,
    StepRecord,
)

_MIB = 1 / 2**20
RoundT = TypeVar("RoundT", StepRecord, HttpRecord)
T = TypeVar("T")


def figures(log: Log) -> list[Figure]:
    """Return the figures of a comparison, by model and side."""
    return [
        figure
        for model in log.of(ModelRecord)
        for side in SIDE_NAMES
        for figure in (
            *_step_figures(log, model.model, side),
            *_http_figures(log, model.model, side),
            *_start_figures(log, model.model, side),
        )
        if figure.values
    ]


def _step_figures(log: Log, model: str, side: str) -> Iterator[Figure]:
    figure = partial(Figure, model=model, side=side)
    records = log.all_of(StepRecord, model=model, side=side)
    for batch in sorted({r.batch for r in records if r.decodes}):
        fields = {"side": side, "model": model, "batch": batch, "decodes": True}
        name, steps = f"decode step, batch {batch}", _rounds(log, StepRecord, **fields)
        values = _each(steps, lambda r: r.step)
        yield figure(name=name, unit="ms", values=[_milliseconds(value) for value in values])
        works = _each(steps, partial(_step_work, log))
        shares = _shares(log, model, values, works)
        yield figure(name=f"{name}, of the limit", unit=SHARE, values=shares)
    for tokens in sorted({r.prompt_tokens for r in records if not r.decodes}):
        fields = {"side": side, "model": model, "prompt_tokens": tokens, "decodes": False}
        name, steps = f"prefill of {tokens} tokens", _rounds(log, StepRecord, **fields)
        values = _each(steps, lambda r: r.prefill)
        yield figure(name=name, unit="s", values=values)
        shares = _shares(log, model, values, [log.work(model).prefill(tokens)] * len(values))
        yield figure(name=f"{name}, of the limit", unit=SHARE, values=shares)


def _http_figures(log: Log, model: str, side: str) -> Iterator[Figure]:
    records = log.all_of(HttpRecord, model=model, side=side)
    for concurrency in sorted({r.concurrency for r in records}):
        fields = {"side": side, "model": model, "concurrency": concurrency}
        loads = _rounds(log, HttpRecord, **fields)
        quantities = _LOAD if concurrency else _MIXED
        for name, unit, value in quantities:
            values = _each(loads, value)
            place = f", {concurrency} at once" if concurrency else ""
            yield Figure(name=f"{name}{place}", model=model, side=side, unit=unit, values=values)


def _start_figures(log: Log, model: str, side: str) -> Iterator[Figure]:
    figure = partial(Figure, model=model, side=side)
    for cold, kind in ((True, "cold"), (False, "warm")):
        starts = log.of(StartRecord, model=model, side=side, cold=cold)
        ready, answered = [s.ready_s for s in starts], [s.answered_s for s in starts]
        yield figure(name=f"{kind} start to ready", unit="s", values=[*ready])
        yield figure(name=f"{kind} start to the first answer", unit="s", values=[*answered])
        if not cold:
            memory = [start.pss * _MIB for start in starts]
            yield figure(name="memory when ready", unit="MiB", values=[*memory])
    loads = log.of(HttpRecord, model=model, side=side)
    highest = [max(r.pss for r in loads) * _MIB] if loads else []
    yield figure(name="highest memory after a load", unit="MiB", values=[*highest])


def _per_token(record: HttpRecord, seconds: float) -> float | None:
    """Return microseconds per output token."""
    return 1e6 * seconds / record.tokens if record.tokens else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


_Quantity = tuple[str, str, Callable[[HttpRecord], float | None]]
_LOAD: tuple[_Quantity, ...] = (
    ("output", "tokens/s", lambda r: r.output_rate),
    ("first token", "ms", lambda r: _milliseconds(r.ttft)),
    ("time per token", "ms", lambda r: _milliseconds(r.itl)),
    ("gap between tokens, p99", "ms", lambda r: _milliseconds(r.gaps[2] if r.gaps else None)),
    ("HTTP process per token", "µs", lambda r: _per_token(r, r.http_cpu_seconds)),
    ("engine processes per token", "µs", lambda r: _per_token(r, r.engine_cpu_seconds)),
)
_MIXED: tuple[_Quantity, ...] = (
    ("prompts of mixed lengths at once", "tokens/s", lambda r: r.prompt_rate),
)


def _rounds(log: Log, kind: type[RoundT], **fields: object) -> list[RoundT | None]:
    """Return the undisturbed record of each round, None for a round without one."""
    by_round: dict[int, RoundT | None] = {r.round: None for r in log.all_of(kind, **fields)}
    by_round |= {r.round: r for r in log.of(kind, **fields)}
    return [by_round[number] for number in sorted(by_round)]


def _each(records: Sequence[RoundT | None], value: Callable[[RoundT], T | None]) -> list[T | None]:
    return [None if record is None else value(record) for record in records]


def _step_work(log: Log, record: StepRecord) -> Work:
    return log.work(record.model).decode_step(record.batch, record.context)


def _shares(
    log: Log, model: str, seconds: Sequence[float | None], works: Sequence[Work | None]
) -> list[float | None]:
    """Return, by round, the least time over the measured one."""
    limits = [log.limits(model, number, "steps") for number in range(1, len(seconds) + 1)]
    return [
        limit.seconds(work.moved, work.flops) / measured if limit and work and measured else None
        for limit, measured, work in zip(limits, seconds, works, strict=True)
    ]
