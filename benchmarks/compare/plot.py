"""Plot a comparison: ``python -m benchmarks.compare.plot RUN.jsonl FILE.png``.

Runs in the peers' environment, which has matplotlib: one row of panels per model, medians over
rounds. A dashed line is the machine's limit.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.runner.records import HttpRecord, LimitsRecord, Log, ModelRecord, StepRecord

_COLOURS = {"ours": "tab:red", "llama.cpp": "tab:blue", "transformers": "tab:orange"}
_OTHER_COLOUR = "tab:gray"


def draw(log: Log, target: Path) -> None:
    """Write the picture of `log`."""
    models = [record.model for record in log.of(ModelRecord)]
    mpl.use("agg")
    figure, rows = plt.subplots(
        len(models), 3, figsize=(14, 3.6 * len(models)), squeeze=False, layout="constrained"
    )
    for axes, model in zip(rows, models, strict=True):
        _throughput(axes[0], log, model)
        _steps(axes[1], log, model)
        _prefill(axes[2], log, model)
    figure.savefig(target, dpi=110)


def _throughput(axes: Any, log: Log, model: str) -> None:
    records = [r for r in log.of(HttpRecord, model=model) if r.concurrency]
    for side in dict.fromkeys(r.side for r in records):
        points = []
        for concurrency in sorted({r.concurrency for r in records if r.side == side}):
            mine = log.of(HttpRecord, model=model, side=side, concurrency=concurrency)
            rate = _median(r.output_rate for r in mine)
            if rate is not None:
                points.append((concurrency, rate))
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, marker="o", label=side, color=_COLOURS.get(side, _OTHER_COLOUR))
    axes.set(xscale="log", yscale="log", xlabel="concurrency", ylabel="output tokens/s")
    axes.set_title(f"{model}: over HTTP")
    ticks = sorted({r.concurrency for r in records})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    if records:
        axes.legend(fontsize=8)


def _steps(axes: Any, log: Log, model: str) -> None:
    bars = []
    for batch, side, mine in _by_size(log.of(StepRecord, model=model, decodes=True), "batch"):
        if (step := _median(r.step for r in mine)) is not None:
            work = log.work(model).decode_step(batch, mine[0].context)
            least = _least(log, model, work.moved, work.flops)
            bars.append((f"{side}\nx{batch}", side, batch / step, batch / least))
    _bars(axes, f"{model}: decode steps in process", "tokens/s", bars)


def _prefill(axes: Any, log: Log, model: str) -> None:
    bars = []
    records = log.of(StepRecord, model=model, decodes=False)
    for tokens, side, mine in _by_size(records, "prompt_tokens"):
        if (seconds := _median(r.prefill for r in mine)) is not None:
            work = log.work(model).prefill(tokens)
            least = _least(log, model, work.moved, work.flops)
            bars.append((f"{side}\n{tokens}", side, tokens / seconds, tokens / least))
    _bars(axes, f"{model}: prefill of one prompt", "tokens/s", bars)


def _by_size(
    records: Sequence[StepRecord], size: str
) -> Iterator[tuple[int, str, list[StepRecord]]]:
    """Yield the records of each value of the field `size` and side."""
    for value in sorted({getattr(r, size) for r in records}):
        for side in dict.fromkeys(r.side for r in records):
            if mine := [r for r in records if (getattr(r, size), r.side) == (value, side)]:
                yield value, side, mine


def _bars(axes: Any, title: str, unit: str, bars: Sequence[tuple[str, str, float, float]]) -> None:
    """Draw (label, side, value, limit) bars."""
    for place, (_, side, value, limit) in enumerate(bars):
        axes.bar(place, value, color=_COLOURS.get(side, _OTHER_COLOUR))
        axes.hlines(limit, place - 0.45, place + 0.45, colors="black", linestyles="dashed")
    axes.set_xticks(range(len(bars)), [label for label, *_ in bars], fontsize=7)
    axes.set(title=title, ylabel=unit)


def _least(log: Log, model: str, moved: int, flops: int) -> float:
    found = log.of(LimitsRecord, model=model, part="steps")
    return statistics.median(record.limits.seconds(moved, flops) for record in found)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


if __name__ == "__main__":
    draw(Log.read(Path(sys.argv[1])), Path(sys.argv[2]))
