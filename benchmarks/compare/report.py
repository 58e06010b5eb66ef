"""Report of a comparison, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from operator import attrgetter

from benchmarks.compare.figures import figures
from benchmarks.runner.command import disturbance, machine_lines
from benchmarks.runner.figures import table
from benchmarks.runner.machine import Machine
from benchmarks.runner.records import (
    Failure,
    Header,
    HttpRecord,
    LimitsRecord,
    Log,
    ModelRecord,
    StepRecord,
)

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
