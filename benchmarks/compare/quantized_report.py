"""Report of a quantised run, from its records.

A ratio is taken between two sides of one round, and only then the median over rounds.
"""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.compare.plans import DECODE_BATCHES
from benchmarks.runner.command import disturbance, machine_lines, spread
from benchmarks.runner.figures import SHARE, Figure
from benchmarks.runner.machine import Machine
from benchmarks.runner.records import (
    EngineRecord,
    Header,
    LimitsRecord,
    Log,
    ModelRecord,
    StepRecord,
)

BASE = "ours bf16"


def our_name(width: str) -> str:
    """Return the name of ours in a form of quantized_forms.FORMS."""
    return f"ours {width}"


def llama_name(kind: str) -> str:
    """Return the name of llama.cpp with a type of quantized_model.GGUF_TYPES."""
    return f"llama.cpp {kind}"


def markdown(log: Log) -> str:
    """Return the report of what `log` holds; raises IndexError without a header or a model."""
    header, model = log.of(Header)[0], log.of(ModelRecord)[0]
    steps = log.of(StepRecord)
    names = [name for name in header.sides if any(s.side == name for s in steps)]
    bandwidths = [record.bytes_per_s / 1e9 for record in log.of(LimitsRecord)]
    return "\n".join(
        [
            f"# Quantised decode, {header.started[:10]}, {header.machine['cpu']}",
            "",
            f"`{header.command}` at {header.started}, commit {header.machine['commit']}.",
            "",
            *machine_lines(Machine(**header.machine), header.load_before),
            *(f"- {name}: {note}" for name, note in header.sides.items()),
            "- Read bandwidth on a buffer of the bfloat16 weights, by round: "
            + ", ".join(f"{value:.1f}" for value in bandwidths)
            + " GB/s.",
            "",
            f"{model.model}: {model.parameters / 1e6:.0f}M parameters. A step's time is the median "
            "of a cell's steps, then over rounds. *Of limit* is the weights' bytes over the "
            "round's read bandwidth, over the step. Ratios are taken within a round, with the "
            "lowest and the highest in brackets.",
            "",
            disturbance([record.other_busy_cores for record in steps]) if steps else "",
            "",
            *_table(log, model, names),
            "",
        ]
    )


def figures(log: Log) -> list[Figure]:
    """Return the figures of each side, with the bytes that its steps read and its memory."""
    model, found = log.of(ModelRecord)[0], []
    for side in (name for name in log.of(Header)[0].sides if name in model.work):
        figure = partial(Figure, model=model.model, side=side)
        found.append(figure(name="read per step", unit="MB", values=[model.work[side] / 1e6]))
        engines = log.of(EngineRecord, side=side)
        memory = [r.about["private"] / 1e6 for r in engines if r.about.get("private")]
        found.append(figure(name="memory", unit="MB", values=[*memory]))
        for batch in DECODE_BATCHES:
            cells = _cells(log.of(StepRecord), side, batch)
            name, steps = (
                f"decode step, batch {batch}",
                [1e3 * r.step if r.step else None for r in cells],
            )
            found.append(figure(name=name, unit="ms", values=steps))
            shares = [_of_limit(log, model, record) for record in cells]
            found.append(figure(name=f"{name}, of the limit", unit=SHARE, values=shares))
        prefills = [r.prefill for r in log.of(StepRecord, side=side) if not r.decodes]
        found.append(figure(name="prefill of 128 tokens", unit="s", values=prefills))
    return [figure for figure in found if figure.values]


def _table(log: Log, model: ModelRecord, names: list[str]) -> list[str]:
    heads = "".join(f"| batch {b} ms | of limit | vs bf16 " for b in DECODE_BATCHES)
    lines = [
        f"| side | read per step MB | memory MB {heads}| prefill 128 tokens/s |",
        "|---" * (4 + 3 * len(DECODE_BATCHES)) + "|",
    ]
    for name in names:
        cells = [f"{model.work[name] / 1e6:.0f}", _memory(log, name)]
        for batch in DECODE_BATCHES:
            ours = _cells(log.of(StepRecord), name, batch)
            cells += [
                _middle([record.step for record in ours], 1e3),
                _middle([_of_limit(log, model, record) for record in ours], 1.0),
                _ratio(log.of(StepRecord), BASE, name, batch),
            ]
        prefills = [r for r in log.of(StepRecord, side=name) if r.output_tokens == 1]
        rates = [r.prompt_tokens / r.prefill if r.prefill else None for r in prefills]
        cells.append(_middle(rates, 1.0, ".0f"))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _memory(log: Log, name: str) -> str:
    found = [record.about.get("private") for record in log.of(EngineRecord, side=name)]
    return f"{found[0] / 1e6:.0f}" if found and found[0] else "-"


def _of_limit(log: Log, model: ModelRecord, record: StepRecord) -> float | None:
    limits = log.limits(model.model, record.round, "steps")
    if limits is None or not record.step:
        return None
    return model.work[record.side] / limits.bytes_per_s / record.step


def _cells(steps: list[StepRecord], side: str, batch: int) -> list[StepRecord]:
    return [r for r in steps if (r.side, r.batch) == (side, batch) and r.output_tokens > 1]


def _ratios(steps: list[StepRecord], slow: str, fast: str, batch: int) -> list[float]:
    """Return, by round, the step time of `slow` over that of `fast`."""
    slow_steps = {record.round: record.step for record in _cells(steps, slow, batch)}
    return [
        slow_steps[record.round] / record.step  # type: ignore[operator]
        for record in _cells(steps, fast, batch)
        if record.step and slow_steps.get(record.round)
    ]


def _ratio(steps: list[StepRecord], slow: str, fast: str, batch: int) -> str:
    return spread(_ratios(steps, slow, fast, batch))


def _middle(values: list[float | None], factor: float, spec: str = "") -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.median(known) * factor:{spec or ('.1f' if factor > 1 else '.2f')}}"
