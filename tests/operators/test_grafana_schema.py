"""The dashboards' files against what Grafana 10.4 publishes of its model; no Grafana runs here.

The facts are those of its schema (kinds/dashboard/dashboard_kind.cue) and of the panels' own; the
JSON schemas below hold what these dashboards use of it, and nothing else passes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from deploy.grafana.generate import FOLDER

FILES = sorted(FOLDER.glob("*.json"))
Json = dict[str, Any]
# Grafana's ids of the units that are used, from the list that its unit picker shows.
UNITS = [
    *("short", "s", "ms", "percentunit", "percent", "bytes", "ops", "reqps", "celsius", "watt"),
    *("joule", "none", "Bps"),
]
_TEXT = {"type": "string", "minLength": 1}
_FLAG = {"type": "boolean"}
_COLOURS = {"enum": ["green", "orange", "red", "yellow", "blue"]}


def closed(required: Json, optional: Json | None = None) -> Json:
    """Return the schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


SOURCE = closed({"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}})
PLACE = closed(
    {
        "h": {"type": "integer", "minimum": 1},
        "w": {"type": "integer", "minimum": 1, "maximum": 24},
        "x": {"type": "integer", "minimum": 0, "maximum": 23},
        "y": {"type": "integer", "minimum": 0},
    }
)
TARGET = closed(
    {
        "datasource": SOURCE,
        "editorMode": {"enum": ["code", "builder"]},
        "expr": _TEXT,
        "format": {"enum": ["time_series", "table", "heatmap"]},
        "instant": _FLAG,
        "legendFormat": _TEXT,
        "range": _FLAG,
        "refId": {"type": "string", "pattern": "^[A-Z]$"},
    }
)
STEP = closed({"color": _COLOURS, "value": {"type": ["number", "null"]}})
DEFAULTS = closed(
    {
        "color": closed({"mode": {"enum": ["thresholds", "palette-classic", "fixed"]}}),
        "custom": {"type": "object"},
        "mappings": {"type": "array", "maxItems": 0},
        "thresholds": closed(
            {"mode": {"const": "absolute"}, "steps": {"type": "array", "items": STEP}}
        ),
        "unit": {"enum": UNITS},
    },
    {
        "min": {"type": "number"},
        "max": {"type": "number"},
        "decimals": {"type": "integer", "minimum": 0},
    },
)
REDUCED = closed(
    {
        "calcs": {"const": ["lastNotNull"]},
        "fields": {"type": "string"},
        "values": _FLAG,
    }
)
MULTI = {"enum": ["single", "multi", "none"]}
OPTIONS: dict[str, Json] = {
    "timeseries": closed(
        {
            "legend": closed(
                {
                    "calcs": {"type": "array", "items": {"enum": ["lastNotNull", "max", "mean"]}},
                    "displayMode": {"enum": ["list", "table", "hidden"]},
                    "placement": {"enum": ["bottom", "right"]},
                }
            ),
            "tooltip": closed({"mode": MULTI, "sort": {"enum": ["asc", "desc", "none"]}}),
        }
    ),
    "stat": closed(
        {
            "colorMode": {"enum": ["value", "background", "none"]},
            "graphMode": {"enum": ["none", "line", "area"]},
            "reduceOptions": REDUCED,
            "textMode": {"enum": ["auto", "value", "value_and_name", "name", "none"]},
        }
    ),
    "bargauge": closed(
        {
            "displayMode": {"enum": ["basic", "lcd", "gradient"]},
            "orientation": {"enum": ["auto", "vertical", "horizontal"]},
            "reduceOptions": REDUCED,
        }
    ),
    "heatmap": closed(
        {
            "calculate": _FLAG,
            "cellGap": {"type": "integer", "minimum": 0, "maximum": 25},
            "color": closed(
                {
                    "mode": {"enum": ["scheme", "opacity"]},
                    "scheme": {"const": "Oranges"},
                    "steps": {"type": "integer", "minimum": 2, "maximum": 128},
                }
            ),
            "legend": closed({"show": _FLAG}),
            "tooltip": closed({"mode": MULTI, "yHistogram": _FLAG}),
            "yAxis": closed({"axisPlacement": {"enum": ["auto", "left", "right", "hidden"]}}),
        }
    ),
    "state-timeline": closed(
        {
            "mergeValues": _FLAG,
            "rowHeight": {"type": "number", "minimum": 0, "maximum": 1},
            "showValue": {"enum": ["auto", "always", "never"]},
        }
    ),
    "table": closed({"cellHeight": {"enum": ["sm", "md", "lg"]}, "showHeader": _FLAG}),
}
_NUMBER = {"type": "integer", "minimum": 1}


def panel(kind: str) -> Json:
    """Return the schema of a panel of this plugin."""
    return closed(
        {
            "datasource": SOURCE,
            "description": _TEXT,
            "fieldConfig": closed({"defaults": DEFAULTS, "overrides": {"maxItems": 0}}),
            "gridPos": PLACE,
            "id": _NUMBER,
            "options": OPTIONS[kind],
            "pluginVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
            "targets": {"type": "array", "items": TARGET, "minItems": 1, "maxItems": 26},
            "title": _TEXT,
            "type": {"const": kind},
        }
    )


ROW = closed(
    {
        "collapsed": {"const": False},
        "gridPos": PLACE,
        "id": _NUMBER,
        # The panels of an open row follow it.
        "panels": {"type": "array", "maxItems": 0},
        "title": _TEXT,
        "type": {"const": "row"},
    }
)
CHOICE = {"text": _TEXT, "value": _TEXT}
_NAME = {"type": "string", "pattern": r"^\w+$"}
VARIABLES: dict[str, Json] = {
    "datasource": closed(
        {
            "label": _TEXT,
            "name": _NAME,
            "query": {"const": "prometheus"},
            "refresh": {"const": 1},
            "type": {"const": "datasource"},
        }
    ),
    "custom": closed(
        {
            "current": closed(CHOICE),
            "label": _TEXT,
            "name": _NAME,
            "options": {"type": "array", "items": closed({**CHOICE, "selected": _FLAG})},
            "query": _TEXT,
            "type": {"const": "custom"},
        }
    ),
    "query": closed(
        {
            "allValue": {"const": ".*"},
            "current": closed({"text": {"const": ["All"]}, "value": {"const": ["$__all"]}}),
            "datasource": SOURCE,
            "definition": _TEXT,
            "includeAll": {"const": True},
            "label": _TEXT,
            "multi": {"const": True},
            "name": _NAME,
            "query": closed({"query": _TEXT, "refId": _TEXT}),
            # Once the range changes: a label may be new.
            "refresh": {"const": 2},
            "sort": {"enum": [0, 1, 2]},
            "type": {"const": "query"},
        }
    ),
}
LINK = closed(
    {
        **dict.fromkeys(("title", "icon"), _TEXT),
        **{name: {"type": "string"} for name in ("tooltip", "url")},
        **dict.fromkeys(("asDropdown", "targetBlank", "includeVars", "keepTime"), _FLAG),
        "tags": {"type": "array", "items": _TEXT},
        "type": {"enum": ["link", "dashboards"]},
    }
)
DASHBOARD = closed(
    {
        "annotations": closed({"list": {"type": "array", "maxItems": 0}}),
        "description": _TEXT,
        "editable": _FLAG,
        "graphTooltip": {"enum": [0, 1, 2]},
        "links": {"type": "array", "items": LINK},
        "panels": {"type": "array", "items": {"oneOf": [ROW, *map(panel, OPTIONS)]}},
        "refresh": {"enum": ["5s", "10s", "30s", "1m", "5m", "15m", "30m", "1h", "2h", "1d"]},
        # That of 10.4: an older Grafana would refuse to migrate it backwards.
        "schemaVersion": {"const": 39},
        "tags": {"type": "array", "items": _TEXT},
        "templating": closed(
            {"list": {"type": "array", "items": {"oneOf": list(VARIABLES.values())}}}
        ),
        "time": closed({"from": {"type": "string", "pattern": "^now-"}, "to": {"const": "now"}}),
        "timezone": {"enum": ["browser", "utc"]},
        "title": _TEXT,
        "uid": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,40}$"},
    }
)


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def dashboard(request: pytest.FixtureRequest) -> Json:
    path: Path = request.param
    found: Json = json.loads(path.read_text(encoding="utf-8"))
    assert found["uid"] == path.stem
    return found


def panels_of(dashboard: Json) -> list[Json]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_it_has_the_form_of_a_dashboard(dashboard: Json) -> None:
    problems = []
    for error in Draft202012Validator(DASHBOARD).iter_errors(dashboard):
        problems += [f"{error.json_path}: {cause.message}" for cause in error.context or [error]]
    assert problems == []


def test_ids_and_references_are_told_apart(dashboard: Json) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels_of(dashboard):
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs), panel["title"]
        for target in panel["targets"]:
            # Exactly one of them, or Grafana asks twice, or not at all.
            assert target["instant"] != target["range"], panel["title"]


def test_thresholds_begin_at_the_bottom_and_rise(dashboard: Json) -> None:
    for panel in panels_of(dashboard):
        first, *rest = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert first["value"] is None, panel["title"]
        values = [step["value"] for step in rest]
        assert values == sorted(set(values)), panel["title"]


def test_panels_fit_into_the_grid_without_lying_upon_each_other(dashboard: Json) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_variables_are_declared_before_use_and_used(dashboard: Json) -> None:
    declared: list[str] = []
    for variable in dashboard["templating"]["list"]:
        if variable["type"] != "custom":
            assert set(_variables(json.dumps(variable.get("query", "")))) <= set(declared)
        declared.append(variable["name"])
    assert declared[0] == "datasource"
    assert len(set(declared)) == len(declared)
    exprs = [target["expr"] for panel in panels_of(dashboard) for target in panel["targets"]]
    used = {name for expr in exprs for name in _variables(expr)}
    assert used <= set(declared)
    # Those that narrow others down are used by them.
    inner = json.dumps(dashboard["templating"])
    assert set(declared) - {"datasource"} <= used | set(_variables(inner))


def test_tables_ask_for_tables_and_heat_maps_know_their_buckets(dashboard: Json) -> None:
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            assert (target["format"] == "table") == (panel["type"] == "table"), panel["title"]
            if "_bucket{" in target["expr"] and panel["type"] == "heatmap":
                assert target["format"] == "heatmap", panel["title"]


def _variables(text: str) -> Iterator[str]:
    """The names of variables in a text, Grafana's own left out."""
    yield from (name for name in re.findall(r"\$\{?(\w+)\}?", text) if not name.startswith("__"))
