"""Draw docs/images/rbln-*.png: the dashboards with data of a live server under load.

`python docs/pictures.py` starts the scene of tests/operators (a tiny model with LoRA on the
emulated device, a stand-in of the vendor's exporter, a real Prometheus), loads it for a minute
and draws the results of every panel's queries.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from deploy.grafana.generate import DASHBOARDS
from deploy.grafana.panel import COLUMNS, Dashboard, Panel, Query
from tests.checkpoints import CheckpointCache
from tests.operators.scene import Scene, running_scene

IMAGES = Path(__file__).resolve().parent / "images"
_INCHES_A_COLUMN = 0.68
_INCHES_A_LINE = 0.36
_SERIES_SHOWN = 8
_CREDIT = "drawn by matplotlib from the answers to the panels' queries; not a picture of Grafana"
_SCALES = {"percentunit": 100.0, "bytes": 1 / 2**20}
_UNITS = {"percentunit": "%", "bytes": "MiB", "celsius": "°C", "percent": "%", "ops": "/s"}
_UNITS |= {"reqps": "/s", "s": "s", "joule": "J", "watt": "W", "short": ""}

Series = list[tuple[str, list[tuple[float, float]]]]


def main() -> None:
    """Run the scene and write one picture a dashboard."""
    mpl.use("agg")
    IMAGES.mkdir(exist_ok=True)
    checkpoints = CheckpointCache(Path.home() / ".cache" / "rbln-serve" / "test-checkpoints")
    with (
        tempfile.TemporaryDirectory() as folder,
        running_scene(checkpoints, Path(folder)) as scene,
    ):
        scene.load(seconds=60)
        for dashboard in DASHBOARDS:
            draw(dashboard, scene)


def draw(dashboard: Dashboard, scene: Scene) -> None:
    """Write the picture of one dashboard, its panels where Grafana places them."""
    placed = [p["gridPos"] for p in dashboard.json()["panels"] if p["type"] != "row"]
    lines = max(place["y"] + place["h"] for place in placed)
    size = (COLUMNS * _INCHES_A_COLUMN, lines * _INCHES_A_LINE)
    figure = plt.figure(figsize=size)
    for panel, place in zip(dashboard.panels, placed, strict=True):
        box = (
            (place["x"] + 0.75) / COLUMNS,
            1 - (place["y"] + place["h"] - 1.2) / lines,
            (place["w"] - 1.1) / COLUMNS,
            (place["h"] - 2.3) / lines,
        )
        axes = figure.add_axes(box)
        axes.set_title(panel.title, fontsize=8, loc="left")
        axes.tick_params(labelsize=6)
        series = [one for query in panel.queries for one in _named(query, scene.series(query))]
        _DRAWN[panel.kind](axes, panel, series, scene.began)
    figure.text(0.995, 0.002, _CREDIT, fontsize=7, ha="right", va="bottom", color="dimgray")
    figure.savefig(IMAGES / f"{dashboard.uid}.png", dpi=80)
    plt.close(figure)


def _named(query: Query, result: Sequence[dict[str, Any]]) -> Series:
    """Return the legend and the points of each series; NaN is left out."""
    found: Series = []
    for one in result:
        name = query.legend
        for label, value in one["metric"].items():
            name = name.replace(f"{{{{{label}}}}}", value)
        points = one.get("values") or [one["value"]]
        kept = [(float(t), float(v)) for t, v in points if not math.isnan(float(v))]
        if kept:
            absent = re.sub(r"{{\w+}}", "", name)
            found.append((" ".join(absent.split()) or _labels(one["metric"]), kept))
    return found


def _labels(metric: dict[str, str]) -> str:
    return " ".join(f"{label}={value}" for label, value in metric.items() if label[:2] != "__")


def _lines(axes: Any, panel: Panel, series: Series, began: float) -> None:
    scale = _SCALES.get(panel.unit, 1.0)
    series = sorted(series, key=lambda one: -one[1][-1][1])[:_SERIES_SHOWN]
    if panel.stack and series:
        times = sorted({t for _, points in series for t, _ in points})
        heights = [[dict(points).get(t, 0.0) * scale for t in times] for _, points in series]
        names = [name for name, _ in series]
        axes.stackplot([t - began for t in times], heights, labels=names, alpha=0.6)
    else:
        for name, points in series:
            axes.plot([t - began for t, _ in points], [v * scale for _, v in points], label=name)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)  # room for the legend
    axes.set_ylabel(_UNITS.get(panel.unit, panel.unit), fontsize=6)
    axes.grid(alpha=0.3)
    if any(name for name, _ in series):
        axes.legend(fontsize=5, ncols=2, loc="upper left")
    elif not series:
        _nothing(axes)


def _tile(axes: Any, panel: Panel, series: Series, _: float) -> None:
    axes.axis("off")
    value = series[0][1][-1][1] * _SCALES.get(panel.unit, 1.0) if series else math.nan
    colour = "gray"
    for step in panel.steps if series else ():
        if step.value is None or series[0][1][-1][1] >= step.value:
            colour = step.colour
    text = f"{value:.4g}{_UNITS.get(panel.unit, '')}" if series else "no data"
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=15, color=f"tab:{colour}")


def _bars(axes: Any, panel: Panel, series: Series, _: float) -> None:
    scale = _SCALES.get(panel.unit, 1.0)
    names = [name for name, _ in series]
    values = [points[-1][1] * scale for _, points in series]
    axes.barh(range(len(names)), values, color="tab:orange")
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.tick_params(axis="y", direction="in", pad=-4)
    for label in axes.get_yticklabels():
        label.set_horizontalalignment("left")
    axes.invert_yaxis()
    axes.set_xlabel(_UNITS.get(panel.unit, panel.unit), fontsize=6)
    if not series:
        _nothing(axes)


def _heat(axes: Any, panel: Panel, series: Series, began: float) -> None:
    if not series:
        _nothing(axes)
        return
    if panel.queries[0].buckets:
        series = _apart(series)
    else:
        series = sorted(series, key=lambda one: float(one[0]))
    times = sorted({t for _, points in series for t, _ in points})
    cells = [[dict(points).get(t, 0.0) for t in times] for _, points in series]
    edges = [t - began for t in times] + [times[-1] + 1 - began]
    axes.pcolormesh(edges, range(len(series) + 1), cells, cmap="Oranges")
    axes.set_yticks([n + 0.5 for n in range(len(series))], [name for name, _ in series], fontsize=5)


def _apart(series: Series) -> Series:
    """Return a histogram's cumulative buckets each by itself, those that hold something."""
    below: dict[float, float] = {}
    found: Series = []
    for name, points in sorted(series, key=lambda one: float(one[0])):
        own = [(t, max(value - below.get(t, 0.0), 0.0)) for t, value in points]
        below = dict(points)
        if any(value for _, value in own):
            found.append((name, own))
    return found or series[:1]


def _states(axes: Any, _: Panel, series: Series, began: float) -> None:
    for line, (_name, points) in enumerate(series):
        axes.broken_barh([(t - began, 1) for t, _ in points], (line - 0.4, 0.8))
    axes.set_yticks(range(len(series)), [name.split()[-1] for name, _ in series], fontsize=6)


def _table(axes: Any, _panel: Panel, series: Series, _began: float) -> None:
    axes.axis("off")
    shown = [f"{name or 'series'}: {points[-1][1]:.6g}" for name, points in series]
    axes.text(0, 0.95, "\n".join(shown) or "no data", va="top", fontsize=7, family="monospace")


def _nothing(axes: Any) -> None:
    axes.text(0.5, 0.5, "no data", ha="center", va="center", fontsize=8, transform=axes.transAxes)


_DRAWN = {
    "timeseries": _lines,
    "stat": _tile,
    "bargauge": _bars,
    "heatmap": _heat,
    "state-timeline": _states,
    "table": _table,
}


if __name__ == "__main__":
    main()
