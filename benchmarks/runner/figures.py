"""Measured quantities of a run, in one form for all commands: reports and targets read them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.runner.command import RunHeader, compact_json, heading, spread
from benchmarks.runner.machine import Machine

OURS = "ours"
SHARE = "%"
_MISSING = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One quantity of one side: a value per round, None for a round that stayed disturbed.

    Values of the unit "%" are shares of 1.
    """

    name: str
    model: str
    side: str
    unit: str
    values: list[float | None]

    @property
    def known(self) -> list[float]:
        """Return the values of undisturbed rounds."""
        return [value for value in self.values if value is not None]

    @property
    def text(self) -> str:
        """Return the median, with the lowest and highest value in brackets."""
        return shown(self.known, self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRun(RunHeader):
    """All figures of one run; `sides` describes each side."""

    about: str
    sides: dict[str, str]
    figures: list[Figure]
    notes: list[str]


def shown(values: Sequence[float], unit: str) -> str:
    """Return the median and range in `unit`, with about three digits."""
    middle = statistics.median(values) if values else 0.0
    digits = 3 if middle < 1 else 2 if middle < 10 else 1 if middle < 100 else 0
    return spread(values, digits, share=unit == SHARE)


def find(figures: Iterable[Figure], name: str, model: str, side: str = OURS) -> Figure | None:
    """Return a figure with an undisturbed value, or None."""
    for figure in figures:
        if (figure.name, figure.model, figure.side) == (name, model, side) and figure.known:
            return figure
    return None


def ratios(above: Figure, below: Figure) -> list[float]:
    """Return the ratios of two figures by round, where both have a value."""
    pairs = zip(above.values, below.values, strict=False)
    return [a / b for a, b in pairs if a is not None and b]


def read_run(path: Path) -> FigureRun:
    """Return a saved run. Raises OSError, ValueError, or KeyError for another form."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields["machine"] = Machine(**fields["machine"])
    fields["figures"] = [Figure(**figure) for figure in fields["figures"]]
    return FigureRun(**fields)


def to_json(run: FigureRun) -> str:
    """Return the run as JSON, one figure a line, its values with six digits."""
    fields = asdict(run)
    for figure in fields["figures"]:
        figure["values"] = [None if v is None else float(f"{v:.6g}") for v in figure["values"]]
    return compact_json(fields)


def markdown(run: FigureRun) -> str:
    """Return the report of a run: a table of figures by side for each model."""
    lines = [*heading(run.about, run), *(f"- `{n}`: {note}." for n, note in run.sides.items()), ""]
    lines += [
        "Medians of the rounds, with the lowest and highest in brackets. A sample during which "
        "other processes kept more than 0.1 cores busy was repeated, at most twice; one that "
        f"stayed disturbed has no figure ({_MISSING}).",
        "",
        *(line for note in run.notes for line in (note, "")),
    ]
    for model in dict.fromkeys(figure.model for figure in run.figures):
        lines += [f"## {model}", "", *table(run.figures, model), ""]
    disturbed = sum(value is None for figure in run.figures for value in figure.values)
    values = sum(len(figure.values) for figure in run.figures)
    return "\n".join([*lines, f"{disturbed} of {values} values stayed disturbed."]) + "\n"


def table(figures: Sequence[Figure], model: str) -> Iterator[str]:
    """Yield the lines of a table of a model's figures, with a column for each side."""
    mine = [figure for figure in figures if figure.model == model]
    sides = list(dict.fromkeys(figure.side for figure in mine))
    rows = {figure.name: figure for figure in mine}
    peers = [side for side in sides if side != OURS] if OURS in sides else []
    yield f"| | unit | {' | '.join(sides)}{''.join(f' | ours / {p}' for p in peers)} |"
    yield "|" + "---|" * (2 + len(sides) + len(peers))
    for name, row in rows.items():
        found = {side: find(mine, name, model, side) for side in sides}
        cells = [_MISSING if figure is None else figure.text for figure in found.values()]
        ours = found.get(OURS)
        for peer in peers:
            other = found[peer]
            cells.append(spread(ratios(ours, other)) if ours and other else _MISSING)
        yield f"| {name} | {row.unit} | {' | '.join(cells)} |"
