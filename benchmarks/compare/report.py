"""Report of a comparison, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.compare import tables
from benchmarks.compare.targets import verdicts
from benchmarks.runner.command import disturbance, machine_lines, spread
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
over rounds; ratios are taken within a round, ours over theirs or as said, with the lowest and the
highest in brackets. `~` marks loads cut off at the end of their time budget: the rate that the rest
would give at the pace so far, or the rate so far where not every request had begun.

*Of limit* is the least time over the measured one. The least time is the larger of bytes over read
bandwidth (weights and the KV cache in use, once a step) and FLOPs over the peak of the unit that
multiplies, both measured at the start of the round; *bound by* says which. Each model's section
names the unit. Over HTTP it counts the decode step alone, against the inter-token latency."""

_PRODUCTS = {"tiles": "bfloat16 tiles", "pairs": "bfloat16 pairs", "FMA": "float32 FMA"}


def markdown(log: Log) -> str:
    """Return the report of the records in `log`."""
    parts = [_heading(log.of(Header)[0]), _targets(log)]
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


def _targets(log: Log) -> str:
    rows = []
    for verdict in verdicts(log):
        bound = verdict.least if verdict.least is not None else verdict.most
        sign = "≥" if verdict.least is not None else "≤"
        bound_text = f"{bound:.0%}" if verdict.is_share else f"{bound:.2f}×"
        measured = spread(verdict.values, share=verdict.is_share)
        cells = [verdict.model, verdict.target, f"{sign} {bound_text}", measured, verdict.result]
        rows.append(cells)
    head = ["model", "target", "bound", "measured", "result"]
    return "\n".join(["## Targets", "", *tables.table(head, rows), ""])


def _model(log: Log, model: ModelRecord) -> str:
    name = model.model
    lines = [f"## {name}: {model.parameters / 1e6:.1f}M parameters", "", *_limits(log, name), ""]
    for title, make in (
        ("In process: decode steps", tables.decode_steps),
        ("In process: prefill of one prompt", tables.prefill),
        ("Over HTTP", tables.http),
        ("Over HTTP: prompts of mixed lengths at once, one output token", tables.mixed),
        ("Start-up", tables.starts),
        ("Memory, MiB (PSS)", tables.memory),
        ("Ours alone, more and more requests at a time", tables.sweep),
    ):
        if rows := make(log, name):
            lines += [f"### {title}", "", *rows, ""]
    others = [r.other_busy_cores for r in log.of(StepRecord, model=name)]
    others += [r.other_busy_cores for r in log.of(HttpRecord, model=name)]
    if others:
        lines += [disturbance(others), ""]
    if agreement := tables.agreement(log, name):
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
