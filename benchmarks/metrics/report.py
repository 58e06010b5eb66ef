"""Report of the cost of metrics."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.metrics.calls import A_GAUGE, A_STEP
from benchmarks.runner.command import RunHeader, disturbance, heading

TARGET = 0.01
"""Maximum share of throughput that metrics cost."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Samples of the same work, each first with metrics, then without, in `unit`."""

    label: str
    unit: str
    samples: list[tuple[float, float]]
    other_busy_cores: float

    @property
    def costs(self) -> list[float]:
        """Added share of time by pair."""
        return [metered / without - 1.0 for metered, without in self.samples]

    @property
    def cost(self) -> float:
        """Median share."""
        return statistics.median(self.costs)

    @property
    def spread(self) -> tuple[float, float]:
        """Quartiles of the shares."""
        if len(self.samples) < 2:
            return self.cost, self.cost
        first, _, third = statistics.quantiles(self.costs, n=4)
        return first, third


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command; `calls` are seconds."""

    model: str
    calls: dict[str, float]
    steps: list[Pairs]
    loads: list[Pairs]


def markdown(run: Run) -> str:
    """Return the report."""
    measured = [*run.steps, *run.loads]
    worst = max(pairs.cost for pairs in measured)
    met = "met" if worst < TARGET else f"missed by {worst - TARGET:.2%}"
    lines = [
        *heading("What metrics cost", run),
        f"- Model {run.model}. Target: less than {TARGET:.0%} of throughput; **{met}** "
        f"(largest median {worst:+.2%}).",
        f"- {disturbance([pairs.other_busy_cores for pairs in measured])}",
        "",
        "## With and without, in turn",
        "",
        "| load | unit | with | without | cost, median | quartiles | pairs |",
        "|---|---|---|---|---|---|---|",
        *map(_row, measured),
        "",
        "## Single calls",
        "",
        *(
            f"- {pairs.label}: {_by_calls(run, pairs):.2%} of a step, by the calls below."
            for pairs in run.steps
        ),
        "",
        "| recording | µs |",
        "|---|---|",
        *(f"| {name} | {seconds * 1e6:,.2f} |" for name, seconds in run.calls.items()),
    ]
    return "\n".join(lines) + "\n"


def _by_calls(run: Run, pairs: Pairs) -> float:
    """Return the share of a decode step that its calls take, with one KV cache group."""
    without = statistics.median(sample[1] for sample in pairs.samples)
    return (run.calls[A_STEP] + run.calls[A_GAUGE]) * 1e6 / without


def _row(pairs: Pairs) -> str:
    metered = statistics.median(sample[0] for sample in pairs.samples)
    without = statistics.median(sample[1] for sample in pairs.samples)
    low, high = pairs.spread
    return (
        f"| {pairs.label} | {pairs.unit} | {metered:.4g} | {without:.4g} | {pairs.cost:+.2%} | "
        f"{low:+.2%} to {high:+.2%} | {len(pairs.samples)} |"
    )
