"""Report of the parts of a decode step."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

from benchmarks.runner.command import RunHeader, compact_json, disturbance, heading

OUTSIDE_ROW = "all but the graph, engine process"
OUTSIDE = ("graph", "decode (HTTP process)")
"""Parts of a step that are not the engine process outside the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One function under cProfile, which makes Python slower: a ranking, not times. Per step."""

    name: str
    calls: float
    own_us: float
    all_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """`steps`: microseconds of every part of every step."""

    batch: int
    steps: list[dict[str, float]]
    functions: list[Function]
    other_busy_cores: float

    def parts(self) -> dict[str, tuple[float, float, float]]:
        """Return the median, 10th and 99th percentile of each part, and of all outside the graph.

        The last, `OUTSIDE_ROW`, is the engine process's.
        """
        times = {part: [step[part] for step in self.steps] for part in self.steps[0]}
        times[OUTSIDE_ROW] = [
            sum(us for part, us in step.items() if part not in OUTSIDE) for step in self.steps
        ]
        return {part: _percentiles(values) for part, values in times.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command."""

    model: str
    parameters: int
    prompt_tokens: int
    temperature: float
    results: list[BatchResult]


def markdown(run: Run) -> str:
    """Return the report."""
    lines = [
        *heading("Parts of a decode step", run),
        f"- Model {run.model}, {run.parameters / 1e6:.1f}M parameters; prompts of "
        f"{run.prompt_tokens} tokens, temperature {run.temperature:g}; one engine in one process.",
        f"- {disturbance([result.other_busy_cores for result in run.results])}",
    ]
    for result in run.results:
        lines += ["", f"## Batch {result.batch}", "", *_parts(result), "", *_functions(result)]
    return "\n".join(lines) + "\n"


def _parts(result: BatchResult) -> list[str]:
    rows = [f"{len(result.steps)} steps, microseconds.", ""]
    rows += ["| part | median | 10th percentile | 99th percentile |", "|---|---|---|---|"]
    for part, (middle, low, high) in result.parts().items():
        name = f"**{part}**" if part == OUTSIDE_ROW else part
        rows.append(f"| {name} | {middle:.0f} | {low:.0f} | {high:.0f} |")
    return rows


def _percentiles(values: list[float]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(values, n=100)
    return statistics.median(values), cuts[9], cuts[98]


def _functions(result: BatchResult) -> list[str]:
    rows = ["Functions by their own time under cProfile (a ranking: it slows Python down).", ""]
    rows += ["| function | calls per step | own us | with callees us |", "|---|---|---|---|"]
    rows += [
        f"| `{row.name}` | {row.calls:.1f} | {row.own_us:.1f} | {row.all_us:.1f} |"
        for row in result.functions
    ]
    return rows


def to_json(run: Run) -> str:
    """Return the percentiles of every part in microseconds, one batch a line."""
    document = asdict(run)
    document["results"] = [
        {
            "batch": result.batch,
            "other_busy_cores": result.other_busy_cores,
            "parts": {part: [round(us, 1) for us in row] for part, row in result.parts().items()},
        }
        for result in run.results
    ]
    return compact_json(document)
