"""docs/targets.md, docs/cost_curves.md and README's tables, from the saved results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from results_page import PROCESSORS, disturbance_of, processor_of

from benchmarks.engines.sides import VLLM_NAMES
from benchmarks.runner.command import RESULTS
from benchmarks.runner.curves import CURVES, SLACK, fits
from benchmarks.runner.figures import Figure, find, ratios, shown
from benchmarks.runner.targets import (
    SavedFigures,
    TargetResult,
    result_table,
    saved_figures,
    saved_results,
)

README_BEGIN = "<!-- Written by docs/generate.py from benchmarks/results. -->"
_MODELS = ("15m", "160m", "1.2b")
_MANY = 100
"""Ratios above it are those of a load that hardly began in its time budget."""
_ALL_CORES, _DEFAULT = VLLM_NAMES[1], VLLM_NAMES[0]


def targets_blocks() -> Iterator[str]:
    """Yield the blocks of docs/targets.md after its notice."""
    yield (
        "Look up whether a target of speed is met, and in which result file. Each target is a "
        "bound of a figure; `benchmarks/runner/targets.py` lists them. The result is the median "
        "of the newest file that has the figure. *Of vLLM* is the ratio to the better "
        "configuration of vLLM's CPU backend within a round. It counts only where the "
        "configuration with a thread on every core and the documented preload was measured. "
        "Repeat the measurements with `make bench` and `python -m benchmarks scenarios --save` "
        "([benchmarks](../benchmarks/README.md))."
    )
    results = saved_results()
    yield summary(results)
    yield (
        "What keeps the missed ones from their bounds, and what was tried: [decode steps, prefill "
        "and attention](kernels.md#a-decode-step) (part 3), [the engine "
        "process](engine.md#plain-decode-steps) and [the HTTP "
        "process](engine.md#the-http-process-per-token) (4), [starts]"
        "(engine.md#start-up-and-what-the-operator-sees) (7), [prompts of mixed "
        "lengths](kernels.md#prompts-of-mixed-lengths). The goals of 2.2 × vLLM's output at 8 at "
        "once were set beside its default configuration. A step of 160M is at 69 % of the limit "
        "and one of 1.2B at 90 %, so that a step at the limit would have 2.2 and 1.8 × the output "
        "of its strongest configuration, without any work of a server (28 November 2026)."
    )
    yield "\n".join(result_table(results, link="../benchmarks/results"))


def summary(results: Sequence[TargetResult]) -> str:
    """Return the numbers of targets that are met, missed and not measured."""
    met, missed, absent = _by_verdict(results)
    return (
        f"Of {len(results)} targets {len(met)} are met in a saved result, {len(missed)} are "
        f"missed and {len(absent)} were not measured."
    )


def _by_verdict(results: Sequence[TargetResult]) -> tuple[list[TargetResult], ...]:
    """Return the results that are met, missed and not measured."""
    met = [r for r in results if r.verdict == "met"]
    absent = [r for r in results if not r.values]
    return met, [r for r in results if r.values and r not in met], absent


def curves_blocks() -> Iterator[str]:
    """Yield the blocks of docs/cost_curves.md after its notice."""
    yield (
        "See how the cost of each kind of work grows with its amount. An exponent is the slope of "
        "a least-squares line through the logarithms of amount and cost: 1 is proportional, 0 "
        f"constant. More than the expected exponent by {SLACK:g} is too much. Costs have a "
        "constant share, so the last three amounts have an exponent of their own. "
        "`python -m benchmarks scenarios growth --save` measures the curves and draws them."
    )
    saved = next(iter(saved_figures("growth")), SavedFigures("", ()))
    found = {fit.curve.name: fit for fit in fits(saved.figures)}
    if saved.stem:
        yield f"[Result](../benchmarks/results/{saved.stem}.md), {saved.stem[:10]}."
    else:
        yield "No run is saved yet."
    if (RESULTS / f"{saved.stem}.svg").is_file():
        yield f"![Curves of cost](../benchmarks/results/{saved.stem}.svg)"
    lines = ["| cost | amounts | expected | because it | measured | last three | |"]
    lines.append("|---|---|---|---|---|---|---|")
    for curve in CURVES:
        fit = found.get(curve.name)
        cells = ["–", "–", "not measured"]
        if fit is not None:
            cells = [f"{fit.exponent:.2f}", f"{fit.tail:.2f}", fit.verdict]
        sizes = f"{curve.sizes[0]:,} to {curve.sizes[-1]:,}"
        row = [curve.name, sizes, f"{curve.expected:g}", curve.reason, *cells]
        lines.append(f"| {' | '.join(row)} |")
    yield "\n".join(lines)


def readme_blocks() -> Iterator[str]:
    """Yield the blocks of README's section on speed."""
    yield "\n".join(_comparison())
    results = saved_results()
    _, missed, absent = _by_verdict(results)
    yield (
        f"{summary(results)} [Every target](docs/targets.md). Those that are not met, by model, "
        "as measured and with their bounds:"
    )
    groups = {
        r.target.model: [s for s in missed if s.target.model == r.target.model] for r in missed
    }
    lines = [f"* {model}: {'; '.join(map(_missed, group))}" for model, group in groups.items()]
    if absent:
        lines.append(f"* not measured: {'; '.join(map(_name, absent))}")
    yield "\n".join(lines)


def _missed(result: TargetResult) -> str:
    return f"{result.target.name}: {result.measured.split()[0]} ({result.bound})"


def _name(result: TargetResult) -> str:
    return f"{result.target.model} {result.target.name}"


def _comparison() -> Iterator[str]:
    yield (
        "| processor | model | tokens/s, 1 / 8 | × vLLM CPU, all cores | × vLLM CPU, default "
        "| × llama.cpp's decode speed | samples disturbed |"
    )
    yield "|---|---|---|---|---|---|---|"
    saved = [(run, processor_of(_report(run).read_text())) for run in saved_figures("compare")]
    for words in PROCESSORS.values():
        runs = [run for run, processor in saved if processor == words]
        previous = ""
        for model in _MODELS:
            run = next((r for r in runs if _rate(r.figures, model, 1)), None)
            if run is None:
                continue
            place = "" if run.stem == previous else f"{words}, {run.stem[:10]}"
            yield f"| {place} | {model} | {_cells(run, model)} |"
            previous = run.stem


def _cells(run: SavedFigures, model: str) -> str:
    rates = [_rate(run.figures, model, count) for count in (1, 8)]
    report = _report(run)
    disturbed = disturbance_of(_section(report, model)) or "none reported"
    cells = [
        " / ".join("–" if rate is None else shown(rate.known, "").split()[0] for rate in rates),
        *(
            _ratios(run.figures, model, "output, {} at once", side, faster=True)
            for side in (_ALL_CORES, _DEFAULT)
        ),
        _ratios(run.figures, model, "decode step, batch {}", "llama.cpp", faster=False),
        f"[{disturbed}](benchmarks/results/{report.name})",
    ]
    return " | ".join(cells)


def _report(run: SavedFigures) -> Path:
    return RESULTS / f"{run.stem}.md"


def _section(report: Path, model: str) -> str:
    """Return the part of a report on a model."""
    text = report.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(model)}:.*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return found[0] if found else ""


def _rate(figures: Sequence[Figure], model: str, count: int) -> Figure | None:
    return find(figures, f"output, {count} at once", model)


def _ratios(figures: Sequence[Figure], model: str, name: str, side: str, *, faster: bool) -> str:
    """Return how many times as fast ours is with 1 and 8, "–" where a side was not measured."""
    cells = []
    for count in (1, 8):
        ours, theirs = (find(figures, name.format(count), model, s) for s in ("ours", side))
        found = []
        if ours and theirs:
            found = ratios(ours, theirs) if faster else ratios(theirs, ours)
        middle = sorted(found)[len(found) // 2] if found else 0.0
        cells.append("–" if not found else f"{middle:.2f}" if middle < _MANY else f"> {_MANY}")
    return " / ".join(cells)
