"""Report of the parts of a decode step."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass

from benchmarks.runner.command import RunHeader, disturbance, heading

TARGETS_US = {1: 350.0, 8: 600.0, 32: 900.0}
"""Maximum microseconds of a step outside its graph, by batch size."""
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

    def overheads(self) -> list[float]:
        """Return the microseconds of each step in the engine process outside the graph."""
        return [sum(us for part, us in step.items() if part not in OUTSIDE) for step in self.steps]


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
    for part in result.steps[0]:
        rows.append(_row(part, [step[part] for step in result.steps]))
    rows.append(_row("**all but the graph, engine process**", result.overheads()))
    target = TARGETS_US.get(result.batch)
    if target is not None:
        rows += ["", f"Target for all but the graph: {target:.0f}."]
    return rows


def _row(name: str, values: list[float]) -> str:
    cuts = statistics.quantiles(values, n=100)
    return f"| {name} | {statistics.median(values):.0f} | {cuts[9]:.0f} | {cuts[98]:.0f} |"


def _functions(result: BatchResult) -> list[str]:
    rows = ["Functions by their own time under cProfile (a ranking: it slows Python down).", ""]
    rows += ["| function | calls per step | own us | with callees us |", "|---|---|---|---|"]
    rows += [
        f"| `{row.name}` | {row.calls:.1f} | {row.own_us:.1f} | {row.all_us:.1f} |"
        for row in result.functions
    ]
    return rows


def to_json(run: Run) -> str:
    """Return every step's parts as columns, rounded to a tenth of a microsecond."""
    document = asdict(run)
    for result, raw in zip(document["results"], run.results, strict=True):
        result["steps"] = {
            part: [round(step[part], 1) for step in raw.steps] for part in raw.steps[0]
        }
    return json.dumps(document, indent=1) + "\n"
