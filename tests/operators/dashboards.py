"""The dashboards of deploy/grafana, read from their files."""

from __future__ import annotations

import json
from typing import Any

from tests.architecture.source_tree import ROOT

FILES = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
DASHBOARDS: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in FILES]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a dashboard without its row headings."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def variables() -> list[dict[str, Any]]:
    """Return the variables of all dashboards."""
    return [variable for one in DASHBOARDS for variable in one["templating"]["list"]]
