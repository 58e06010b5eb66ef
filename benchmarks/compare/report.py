"""Figures and report of a comparison's records; ratios of two figures are taken within a round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import TypeVar

from benchmarks.runner.command import SHARE, Figure, disturbance, machine_lines, table
from benchmarks.runner.machine import Machine, Work
from benchmarks.runner.records import (
    Failure,
    Header,
    HttpRecord,
    LimitsRecord,
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
    sides = dict.fromkeys(r.side for r in log.records if isinstance(r, StepRecord | StartRecord))
    return [
        figure
        for model in log.of(ModelRecord)
        for side in sides
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


_METHOD = """\
Prompts of 32 tokens, 128 greedy output tokens, bfloat16 weights, random but of ordinary scale.
Every round measures the limits with all engines stopped, then each cell on every side in turn; who
is first changes, and the sides that are not measured are stopped (SIGSTOP). Figures are medians
over rounds, ratios are taken within a round, with the lowest and the highest in brackets. A load
that was cut off at the end of its time budget has the rate that the rest would give at the pace so
far, or the rate so far where not every request had begun. A disturbed sample was repeated, at most
twice, and is in no figure.

*Of the limit* is the least time over the measured one. The least time is the larger of bytes over
read bandwidth (weights and the KV cache in use, once a step) and FLOPs over the peak of the unit
that multiplies, both measured at the start of the round. Each model's section names the unit.
Weights count with the bytes of their dtype. Ours read bfloat16 in 12 bits each where the CPU has
AVX-512, so that a step can take less than that time.
llama.cpp's and transformers' servers answer one request at a time."""

_PRODUCTS = {"pairs": "bfloat16 pairs", "FMA": "float32 FMA"}


def markdown(log: Log) -> str:
    """Return the report of the records in `log`."""
    parts = [_heading(log.of(Header)[0])]
    parts += [_model(log, model) for model in log.of(ModelRecord)]
    return "\n".join(parts)


def _heading(header: Header) -> str:
    machine = Machine(**header.machine)
    peers = ", ".join(f"{name} {version}" for name, version in header.peer_versions.items())
    return "\n".join(
        [
            f"# Comparison, {header.started[:10]}, {machine.cpu}",
            "",
            f"`{header.command}` at {header.started}, commit {machine.commit}.",
            "",
            *machine_lines(machine, header.load_before),
            f"- Peers' environment: {peers}.",
            *(f"- `{name}`: {note}." for name, note in header.sides.items()),
            "",
            _METHOD,
            "",
        ]
    )


def _model(log: Log, model: ModelRecord) -> str:
    name = model.model
    lines = [f"## {name}: {model.parameters / 1e6:.1f}M parameters", "", *_limits(log, name), ""]
    lines += [*table(figures(log), name), ""]
    others = [r.other_busy_cores for r in log.all_of(StepRecord, model=name)]
    others += [r.other_busy_cores for r in log.all_of(HttpRecord, model=name)]
    if others:
        lines += [disturbance(others, excluded=True), ""]
    if agreement := _agreement(log, name):
        lines += [agreement, ""]
    for failure in log.of(Failure, model=name):
        first = failure.text.splitlines()[0]
        lines += [f"**Failed**: {failure.side} ({failure.part}): {first}", ""]
    return "\n".join(lines)


def _limits(log: Log, model: str) -> Iterable[str]:
    found = log.of(LimitsRecord, model=model)
    if not found:
        return
    work = log.work(model)
    rates = [record.bytes_per_s / 1e9 for record in found]
    peaks = [record.flops_per_s / 1e9 for record in found]
    yield (
        f"A decode step reads {work.weight_bytes / 1e6:.1f} MB of weights. All cores read a buffer "
        f"of that size at {statistics.median(rates):.1f} GB/s ({min(rates):.1f} to "
        f"{max(rates):.1f}) and reach {statistics.median(peaks):.0f} GFLOP/s of "
        f"{_PRODUCTS[found[0].unit]} ({min(peaks):.0f} to {max(peaks):.0f})."
    )


def _agreement(log: Log, model: str) -> str:
    """Return the counts of equal first tokens; rounding makes some differ."""
    key = attrgetter("round", "batch", "prompt_tokens", "output_tokens")
    ours = {key(r): r.first_tokens for r in log.of(StepRecord, model=model, side="ours")}
    records = log.of(StepRecord, model=model)
    texts = []
    for side in dict.fromkeys(record.side for record in records if record.side != "ours"):
        mine = [record for record in records if record.side == side]
        both = [(a, b) for r in mine for a, b in zip(ours.get(key(r), []), r.first_tokens)]  # noqa: B905
        texts.append(f"{side} {sum(a == b for a, b in both)} of {len(both)}")
    return f"First tokens in process that agree with ours: {', '.join(texts)}." if texts else ""
