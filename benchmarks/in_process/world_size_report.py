"""The report of benchmarks.world_size."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.runner.command import RunHeader, disturbance, heading


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One batch of one arrangement in one round.

    `step_ms` is the time from submission to the end over the tokens of a request, prefill included:
    tokens of a small model come in bursts, so that less would be timed than was computed. `cpu_ms`
    is the processor time of all processes of the engine meanwhile.
    """

    arrangement: str
    round: int
    batch: int
    step_ms: float
    cpu_ms: float
    other_busy_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command."""

    model: str
    parameters: int
    arrangements: list[str]
    samples: list[Sample]


def markdown(run: Run) -> str:
    """Return the report."""
    lines = [
        *heading("Steps by world size", run),
        f"- Model {run.model}, {run.parameters / 1e6:.1f}M parameters. Ranks divide the cores.",
        f"- {disturbance([sample.other_busy_cores for sample in run.samples])}",
    ]
    for batch in sorted({sample.batch for sample in run.samples}):
        lines += ["", f"## Batch {batch}", "", *_table(run, batch)]
    return "\n".join(lines) + "\n"


def _table(run: Run, batch: int) -> list[str]:
    rows = [
        "Milliseconds per token of every request, prefill included, medians over the rounds.",
        "",
        "| ranks | step | least | processor time | tokens/s | step of one rank over it |",
        "|---|---|---|---|---|---|",
    ]
    samples = [sample for sample in run.samples if sample.batch == batch]
    alone = _median(samples, run.arrangements[0])
    for name in run.arrangements:
        step = _median(samples, name)
        least = min(sample.step_ms for sample in samples if sample.arrangement == name)
        cpu = statistics.median(s.cpu_ms for s in samples if s.arrangement == name)
        rows.append(
            f"| {name} | {step:.2f} | {least:.2f} | {cpu:.2f} | {1000 * batch / step:.0f} | "
            f"{alone / step:.2f} |"
        )
    return rows


def _median(samples: list[Sample], name: str) -> float:
    return statistics.median(s.step_ms for s in samples if s.arrangement == name)
