"""Curves of cost over size: the expected exponent, the measured one, and a picture.

An exponent is the slope of a least-squares line through the logarithms of size and cost. A constant
share makes it smaller, so the last three sizes have an exponent of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runner.figures import Figure

SLACK = 0.15
_TAIL = 3


@dataclass(frozen=True, slots=True)
class Curve:
    """Cost of one kind of work: its name is that of the figures; `expected` is the exponent."""

    name: str
    sizes: tuple[int, ...]
    expected: float
    reason: str


CURVES = (
    Curve(
        "decode step by context",
        (128, 512, 2048, 4096, 8000),
        1.0,
        "reads the weights once, and keys and values of every token",
    ),
    Curve(
        "decode step by batch",
        (1, 4, 16, 64, 256),
        1.0,
        "reads the weights once, and multiplies them with every row",
    ),
    Curve(
        "first token by prompt length",
        (128, 512, 2048, 4096, 8000),
        2.0,
        "attention multiplies every pair of tokens, all else is linear",
    ),
    Curve(
        "decode step by adapters in a batch of 64",
        (1, 4, 16, 64),
        1.0,
        "reads each adapter's weights once",
    ),
    Curve(
        "scheduler and inputs of a step by waiting requests",
        (10, 100, 1000, 10000),
        0.0,
        "reads the head of the queue",
    ),
    Curve("read a stored response", (10, 100, 1000, 10000, 100000), 0.0, "one look-up by index"),
    Curve("store a response", (10, 100, 1000, 10000, 100000), 0.0, "one row and its index entries"),
    Curve(
        "refresh of stored responses, every 5 s",
        (10, 100, 1000, 10000, 100000),
        1.0,
        "counts rows by status",
    ),
    Curve("validate a batch file by lines", (1000, 10000, 100000, 1000000), 1.0, "reads each line"),
    Curve(
        "next lines of a batch and their results",
        (1000, 10000, 100000, 1000000),
        0.0,
        "reads and writes the rows of 32 lines",
    ),
    Curve("delete the lines of a batch", (1000, 10000, 100000, 1000000), 1.0, "deletes each row"),
    Curve("metrics page by API keys", (1, 10, 100), 1.0, "writes the series of each key"),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """Measured exponents of a curve, over all sizes and over the last three."""

    curve: Curve
    unit: str
    points: tuple[tuple[int, float], ...]

    @property
    def exponent(self) -> float:
        """Return the exponent over all sizes."""
        return slope(self.points)

    @property
    def tail(self) -> float:
        """Return the exponent over the last three sizes."""
        return slope(self.points[-_TAIL:])

    @property
    def verdict(self) -> str:
        """Return whether the cost grows as expected."""
        excess = max(self.exponent, self.tail) - self.curve.expected
        return "as expected" if excess <= SLACK else f"**grows faster, by {excess:.2f}**"


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Return the least-squares slope of log cost over log size; 0 for less than two points."""
    if len(points) < 2:
        return 0.0
    logs = [(math.log(size), math.log(cost)) for size, cost in points]
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    return float(sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread)


def fits(figures: Sequence[Figure]) -> list[Fit]:
    """Return the curves that have at least two undisturbed sizes, by the least value of each."""
    found = []
    for curve in CURVES:
        mine = [f for f in figures if f.name == curve.name and f.size and f.known]
        points = sorted((f.size or 0, min(f.known)) for f in mine)
        if len(points) > 1:
            found.append(Fit(curve, mine[0].unit, tuple(points)))
    return found


def draw(found: Sequence[Fit], target: Path) -> None:
    """Write an SVG file with one panel per curve, both axes logarithmic."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "rbln-serve"
    columns = 3
    rows = -(-len(found) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(12, 2.7 * rows), squeeze=False, layout="constrained"
    )
    for place in axes.flat[len(found) :]:
        place.axis("off")
    for place, fit in zip(axes.flat, found, strict=False):
        sizes, costs = zip(*fit.points, strict=True)
        place.plot(sizes, costs, marker="o", color="tab:red", label=f"measured, {fit.exponent:.2f}")
        expected = [costs[-1] * (size / sizes[-1]) ** fit.curve.expected for size in sizes]
        label = f"expected, {fit.curve.expected:g}"
        place.plot(sizes, expected, linestyle="dashed", color="black", label=label)
        place.set(xscale="log", yscale="log", ylabel=fit.unit)
        place.set_title(fit.curve.name, fontsize=9)
        place.legend(fontsize=7)
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)
