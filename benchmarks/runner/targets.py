"""Targets of issue 43 and of earlier comparisons, and their results in the saved figures.

A target names a figure of ours, what it is compared with, and a bound. Its result is the median of
the newest saved run that has the figure. docs/targets.md and README's table are generated from it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.runner.command import RESULTS
from benchmarks.runner.figures import (
    OURS,
    SHARE,
    Figure,
    find,
    ratios,
    ratios_to_vllm,
    read_run,
    shown,
)

VLLM, LLAMA = "vLLM", "llama.cpp"
TIMES = "×"
# More than the noise of measuring a limit.
_CREDIBLE_SHARE = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Bound of a figure of ours, which a scenario measures.

    `over` is "" for the figure itself; "vLLM" for its ratio to the better configuration of vLLM's
    CPU backend; another side; or another figure of ours. Either `least` or `most` is set.
    """

    part: str
    scenario: str
    model: str
    figure: str
    over: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def name(self) -> str:
        """Return the figure and its comparison."""
        return f"{self.figure}, of {self.over}" if self.over else self.figure


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetResult:
    """Values of a target by round; `source` is the stem of the result file, "" without one."""

    target: Target
    values: list[float]
    unit: str
    source: str
    peer: str = ""

    @property
    def verdict(self) -> str:
        """Return "met", "missed by 12 %", or the reason for neither."""
        if not self.values:
            return "not measured"
        median, target = statistics.median(self.values), self.target
        if self.unit == SHARE and "of the limit" in target.figure and median > _CREDIBLE_SHARE:
            return "not valid: above the measured limit"
        bound = target.least if target.least is not None else target.most
        assert bound is not None
        met = median >= bound if target.least is not None else median <= bound
        return "met" if met else f"missed by {abs(median / bound - 1):.0%}"

    @property
    def bound(self) -> str:
        """Return the bound with its sign and unit."""
        least = self.target.least is not None
        value = self.target.least if least else self.target.most
        assert value is not None
        text = f"{value:.0%}" if self.unit == SHARE else f"{value:g} {self.unit}"
        return f"{'≥' if least else '≤'} {text}"

    @property
    def measured(self) -> str:
        """Return the median and range."""
        return shown(self.values, self.unit) if self.values else "–"


def _batches(model: str, *shares: tuple[int, float]) -> Iterator[Target]:
    for batch, least in shares:
        figure = f"decode step, batch {batch}, of the limit"
        yield Target(part="3", scenario="compare", model=model, figure=figure, least=least)


def _sampling(model: str) -> Iterator[Target]:
    for count in (1, 8):
        for name in (*SAMPLINGS, "JSON schema"):
            over = f"{'temperature 1' if name == 'JSON schema' else 'greedy'}, {count} at once"
            yield Target(
                part="6" if name == "JSON schema" else "5",
                scenario="sampling",
                model=model,
                figure=f"{name}, {count} at once",
                over=over,
                least=0.9,
            )


def _shapes() -> Iterator[Target]:
    for model in SHAPES:
        for figure, least, most in (
            ("first token of 1,000 tokens", None, 1.0),
            ("output, 1 at once", 1.0, None),
            ("output, 8 at once", 1.0, None),
        ):
            yield Target(
                part="3",
                scenario="shapes",
                model=model,
                figure=figure,
                over=VLLM,
                least=least,
                most=most,
            )


def _earlier() -> Iterator[Target]:
    """Yield the targets of earlier comparisons, against the strongest peer since issue 43."""
    for model, figure, over, least, most in (
        *(("15m", f"time per token, {n} at once", VLLM, None, 0.5) for n in (1, 8)),
        *(("15m", f"HTTP process per token, {n} at once", VLLM, None, 0.6) for n in (1, 8)),
        ("160m", "output, 1 at once", VLLM, 1.7, None),
        ("160m", "output, 8 at once", VLLM, 2.2, None),
        ("1.2b", "output, 1 at once", VLLM, 1.4, None),
        ("1.2b", "output, 8 at once", VLLM, 2.2, None),
        ("1.2b", "decode step, batch 1, of the limit", "", 0.9, None),
        ("1.2b", "decode step, batch 8, of the limit", "", 0.85, None),
        ("1.2b", "decode step, batch 1", LLAMA, None, 1.0),
        ("1.2b", "decode step, batch 8", LLAMA, None, 0.77),
        *(
            (model, f"prefill of {n} tokens, of the limit", "", 0.85, None)
            for model, last in (("15m", 512), ("160m", 512), ("1.2b", 256))
            for n in (128, last)
        ),
        *(
            (model, f"prefill of {n} tokens", LLAMA, None, 0.71)
            for model, last in (("15m", 512), ("160m", 512), ("1.2b", 256))
            for n in (128, last)
        ),
        *(
            (model, "prompts of mixed lengths at once", VLLM, 1.2, None)
            for model in ("15m", "160m", "1.2b")
        ),
        *((model, "warm start to ready", VLLM, None, 0.25) for model in ("15m", "160m", "1.2b")),
    ):
        yield Target(
            part="earlier",
            scenario="compare",
            model=model,
            figure=figure,
            over=over,
            least=least,
            most=most,
        )


SAMPLINGS = (
    *("temperature 1", "temperature 0.7 and top-p 0.9", "top-k 50", "min-p 0.05"),
    *("seed", "repetition penalty", "penalties", "logprobs 5"),
)
"""Compared sampling parameters, by the names of figures."""
SHAPES = (
    *("160m:float16", "160m:float32"),
    *("160m-heads-80", "160m-heads-128", "160m-heads-256"),
)
"""Checkpoints of unusual shapes, with a dtype other than bfloat16 after a colon."""
WORST_MASK = "longest grammar mask of a step"
TARGETS: tuple[Target, ...] = (
    *(
        Target(part="1", scenario="fair_prefill", model="160m", figure=figure, most=most)
        for figure, most in (
            ("first token of 40 tokens behind 7,000", 0.4),
            ("first token of 20 short prompts beside 7,000, p99", 1.0),
            # 5 % are the noise of two measurements of seven seconds.
            ("first token of 7,000 beside 20 short prompts, over the sum of both alone", 1.05),
        )
    ),
    *_batches("160m", (1, 0.88), (8, 0.85), (32, 0.75), (64, 0.75)),
    Target(
        part="3",
        scenario="kernels",
        model="160m",
        figure="attention of a chunk over 7,000 tokens, of the limit",
        least=0.75,
    ),
    *_shapes(),
    *(
        Target(
            part="4",
            scenario="engine_process",
            model="160m",
            figure=f"engine process outside the graph, batch {batch}",
            most=most,
        )
        for batch, most in ((1, 350.0), (8, 600.0), (32, 900.0))
    ),
    *(
        Target(
            part="4",
            scenario="concurrency",
            model="160m",
            figure=f"HTTP process per token, {count} at once",
            over=VLLM,
            most=0.6,
        )
        for count in (1, 8)
    ),
    *_sampling("160m"),
    *_sampling("1.2b"),
    *(
        Target(part="6", scenario="schemas", model=f"ours, {rule}", figure=WORST_MASK, most=20.0)
        for rule in ("omit", "allow")
    ),
    *(
        Target(part="7", scenario="starts", model=model, figure=figure, most=most)
        for model, figure, most in (
            ("default-model", "warm start to the first answer", 4.0),
            ("160m", "warm start to the first answer", 4.0),
            ("1.2b", "warm start to the first answer", 8.0),
            ("160m", "first start with prepared kernels, 64 sequences, context 8,192", 20.0),
        )
    ),
    *(
        Target(part="8", scenario="memory", model="15m", figure=figure, over=over, most=1.05)
        for figure, over in (
            ("memory after 256 streams", "memory after 8 streams"),
            ("memory after ten minutes of mixed load", "memory after two minutes of mixed load"),
        )
    ),
    *_earlier(),
)


@dataclass(frozen=True, slots=True)
class SavedFigures:
    """Figures of a result file."""

    stem: str
    figures: Sequence[Figure]


@cache
def saved_figures(scenario: str) -> tuple[SavedFigures, ...]:
    """Return the saved runs of a scenario, the newest first."""
    if scenario == "compare":
        from benchmarks.compare.figures import figures
        from benchmarks.runner.records import Log

        paths = sorted(RESULTS.glob("*-compare*.jsonl"), reverse=True)
        return tuple(SavedFigures(path.stem, figures(Log.read(path))) for path in paths)
    paths = sorted(RESULTS.glob(f"*-{scenario}.json"), reverse=True)
    if scenario == "schemas":
        return tuple(SavedFigures(path.stem, [*_worst_masks(path)]) for path in paths)
    return tuple(SavedFigures(path.stem, read_run(path).figures) for path in paths)


def _worst_masks(path: Path) -> Iterator[Figure]:
    """Yield the longest mask of each side of a saved comparison of grammars."""
    sides = json.loads(path.read_text(encoding="utf-8"))["sides"]
    for side, found in sides.items():
        worst = max(1000 * schema["worst_mask_s"] for schema in found)
        yield Figure(name=WORST_MASK, model=side, side=OURS, unit="ms", values=[worst])


def saved_results() -> list[TargetResult]:
    """Return the result of each target, from the newest saved run that has its figure."""
    results = []
    for target in TARGETS:
        runs = (result_in(target, s.figures, s.stem) for s in saved_figures(target.scenario))
        none = TargetResult(target=target, values=[], unit=_unit_without(target), source="")
        results.append(next((result for result in runs if result.values), none))
    return results


def result_in(target: Target, figures: Sequence[Figure], source: str) -> TargetResult:
    """Return the result of a target in the figures of one run."""
    ours = find(figures, target.figure, target.model)
    unit = ours.unit if ours is not None and not target.over else _unit_without(target)
    values: list[float] = []
    if ours is not None:
        if not target.over:
            values = ours.known
        elif target.over == VLLM:
            values = ratios_to_vllm(figures, ours, lower=target.most is not None)
        else:
            side = find(figures, target.figure, target.model, target.over)
            other = side or find(figures, target.over, target.model)
            values = ratios(ours, other) if other is not None else []
    return TargetResult(target=target, values=values, unit=unit, source=source)


def _unit_without(target: Target) -> str:
    """Return the unit of a bound whose figure was never measured."""
    if target.over or ", over the sum" in target.figure:
        return TIMES
    if "of the limit" in target.figure:
        return SHARE
    return _UNITS.get(target.scenario, "s")


_UNITS = {"engine_process": "µs", "schemas": "ms"}


def result_table(results: Sequence[TargetResult], *, link: str) -> Iterator[str]:
    """Yield the lines of a Markdown table; `link` is the path of the folder of results."""
    yield "| part | model | target | bound | measured | result |"
    yield "|---|---|---|---|---|---|"
    for result in results:
        target, measured = result.target, result.measured
        if result.source and link:
            measured = f"[{measured}]({link}/{result.source}.md)"
        yield (
            f"| {target.part} | {target.model} | {target.name} | {result.bound} | {measured} "
            f"| {result.verdict} |"
        )


def source_of(result: TargetResult) -> Path:
    """Return the report of a result."""
    return RESULTS / f"{result.source}.md"
