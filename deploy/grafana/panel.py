"""Parts of a dashboard and their JSON for Grafana 10.4 and later, without any metric.

Panels flow from left to right through Grafana's grid of 24 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
Kind = Literal["timeseries", "stat", "heatmap", "bargauge", "state-timeline", "table"]

COLUMNS = 24
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
_SCHEMA_VERSION = 39
_PLUGIN_VERSION = "10.4.0"
_ROW_HEIGHT = 1


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression; `legend` may hold `{{label}}`.

    `buckets` marks series that are a histogram's cumulative buckets; `instant` queries only the
    value at the end of the range.
    """

    expr: str
    legend: str = ""
    instant: bool = False
    buckets: bool = False

    def json(self, ref: str, kind: Kind) -> Json:
        """Return the target `ref` (A, B, ...) of a panel of this kind."""
        form = "heatmap" if self.buckets else "time_series"
        return {
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": self.expr,
            "format": "table" if kind == "table" else form,
            "instant": self.instant,
            "legendFormat": self.legend or "__auto",
            "range": not self.instant,
            "refId": ref,
        }


@dataclass(frozen=True, slots=True)
class Step:
    """Colour of a panel from `value` on (None: from the minimum)."""

    value: float | None
    colour: str


GOOD_ABOVE_99 = (Step(None, "red"), Step(0.95, "orange"), Step(0.99, "green"))
BAD_ABOVE_ZERO = (Step(None, "green"), Step(1e-9, "red"))


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `unit` is Grafana's unit name, `maximum` the end of the axis."""

    title: str
    kind: Kind
    queries: tuple[Query, ...]
    description: str
    unit: str = "short"
    width: int = 8
    height: int = 8
    steps: tuple[Step, ...] = (Step(None, "green"),)
    stack: bool = False
    maximum: float | None = None
    decimals: int | None = None

    def json(self, number: int, x: int, y: int) -> Json:
        """Return the panel with this id and grid position."""
        return {
            "datasource": DATASOURCE,
            "description": self.description,
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "id": number,
            "options": _OPTIONS[self.kind],
            "pluginVersion": _PLUGIN_VERSION,
            "targets": [q.json(chr(ord("A") + n), self.kind) for n, q in enumerate(self.queries)],
            "title": self.title,
            "type": self.kind,
        }

    def _defaults(self) -> Json:
        steps = [{"color": step.colour, "value": step.value} for step in self.steps]
        found: Json = {
            "color": {"mode": "thresholds" if self.kind in _TILES else "palette-classic"},
            "custom": self._custom(),
            "mappings": [],
            "thresholds": {"mode": "absolute", "steps": steps},
            "unit": self.unit,
        }
        if self.kind != "heatmap":
            found["min"] = 0
        if self.maximum is not None:
            found["max"] = self.maximum
        if self.decimals is not None:
            found["decimals"] = self.decimals
        return found

    def _custom(self) -> Json:
        if self.kind == "timeseries":
            return {
                "drawStyle": "line",
                "fillOpacity": 40 if self.stack else 8,
                "lineWidth": 1,
                "showPoints": "never",
                "spanNulls": False,
                "stacking": {"group": "A", "mode": "normal" if self.stack else "none"},
            }
        return {"fillOpacity": 80, "lineWidth": 0} if self.kind == "state-timeline" else {}


_TILES = ("stat", "bargauge", "state-timeline")
_LAST: Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[Kind, Json] = {
    "timeseries": {
        "legend": {"calcs": ["lastNotNull", "max"], "displayMode": "table", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"colorMode": "value", "graphMode": "area", "reduceOptions": _LAST, "textMode": "auto"},
    "bargauge": {"displayMode": "gradient", "orientation": "horizontal", "reduceOptions": _LAST},
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": True},
        "yAxis": {"axisPlacement": "left"},
    },
    "state-timeline": {"mergeValues": True, "rowHeight": 0.8, "showValue": "never"},
    "table": {"cellHeight": "sm", "showHeader": True},
}


@dataclass(frozen=True, slots=True)
class Row:
    """A titled group of panels."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A selector above the dashboard: values of the label `of` of `metric`, or fixed `choices`."""

    name: str
    label: str
    metric: str = ""
    of: str = ""
    choices: tuple[str, ...] = ()
    default: str = ""

    def json(self) -> Json:
        """Return the template variable."""
        if self.choices:
            return {
                "current": _chosen(self.default),
                "label": self.label,
                "name": self.name,
                "options": [
                    {**_chosen(value), "selected": value == self.default} for value in self.choices
                ],
                "query": ",".join(self.choices),
                "type": "custom",
            }
        query = f"label_values({self.metric}, {self.of})"
        return {
            # During a start, vLLM's series are missing, so "All" must match any value.
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
            "datasource": DATASOURCE,
            "definition": query,
            "includeAll": True,
            "label": self.label,
            "multi": True,
            "name": self.name,
            "query": {"query": query, "refId": "variable"},
            "refresh": 2,
            "sort": 1,
            "type": "query",
        }


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard; `uid` is its address in Grafana and the name of its file."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in order."""
        return tuple(panel for row in self.rows for panel in row.panels)

    def json(self) -> Json:
        """Return the dashboard as Grafana's provisioning reads it."""
        return {
            "annotations": {"list": []},
            "description": self.description,
            "editable": True,
            "graphTooltip": 1,
            "links": [_LINKS],
            "panels": _placed(self.rows),
            "refresh": "30s",
            "schemaVersion": _SCHEMA_VERSION,
            "tags": ["rbln-serve"],
            "templating": {"list": [_SOURCES, *(v.json() for v in self.variables)]},
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "title": self.title,
            "uid": self.uid,
        }


_LINKS: Json = {
    "asDropdown": True,
    "icon": "external link",
    "includeVars": True,
    "keepTime": True,
    "tags": ["rbln-serve"],
    "targetBlank": False,
    "title": "rbln-serve",
    "tooltip": "",
    "type": "dashboards",
    "url": "",
}
_SOURCES: Json = {
    "label": "Data source",
    "name": "datasource",
    "query": "prometheus",
    "refresh": 1,
    "type": "datasource",
}


def _chosen(value: str) -> Json:
    return {"text": value, "value": value}


def _placed(rows: tuple[Row, ...]) -> list[Json]:
    """Return the rows and their panels with ids and positions."""
    placed: list[Json] = []
    y = 0
    for row in rows:
        place = {"h": _ROW_HEIGHT, "w": COLUMNS, "x": 0, "y": y}
        number = len(placed) + 1
        placed.append(
            {"collapsed": False, "gridPos": place, "id": number, "panels": [], "title": row.title}
            | {"type": "row"}
        )
        y += _ROW_HEIGHT
        x = height = 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            placed.append(panel.json(len(placed) + 1, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return placed
