"""Dashboards, rules, alerts and runbooks agree with each other, without a server."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.generate import DASHBOARDS, stale
from deploy.grafana.panel import COLUMNS
from tests.architecture.source_tree import ROOT
from tests.debian_tools import debian_tool
from tests.operators.prometheus_process import FOLDER, read_rules

SCENARIOS = Path(__file__).with_name("alerts.test.yml")
RUNBOOKS = ROOT / "docs" / "runbooks"
ALERTS = {rule["alert"] for rule in read_rules("alerts.yml")}


def test_the_dashboards_are_what_the_code_says() -> None:
    assert stale() == [], "run `make dashboards`"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda d: d.uid)
def test_panels_lie_side_by_side_and_say_what_they_show(dashboard: Any) -> None:
    taken: set[tuple[int, int]] = set()
    placed = dashboard.json()["panels"]
    assert len({panel["id"] for panel in placed}) == len(placed)
    for panel in placed:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS, panel["title"]
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"]


def test_titles_are_told_apart() -> None:
    for dashboard in DASHBOARDS:
        titles = [panel.title for panel in dashboard.panels]
        assert len(set(titles)) == len(titles), dashboard.uid


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", str(FOLDER / "prometheus.yml")),
        ("check", "rules", str(FOLDER / "rules.yml"), str(FOLDER / "alerts.yml")),
        ("test", "rules", str(SCENARIOS)),
    ],
    ids=lambda a: " ".join(a[:2]),
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [debian_tool("promtool"), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_and_is_silent_in_a_scenario() -> None:
    tests = yaml.safe_load(SCENARIOS.read_text(encoding="utf-8"))["tests"]
    names = {test["name"] for test in tests}
    for alert in ALERTS:
        assert {f"{alert} fires", f"{alert} is silent"} <= names


def test_each_alert_is_documented() -> None:
    assert {path.stem for path in RUNBOOKS.glob("Rbln*.md")} == ALERTS
    for rule in read_rules("alerts.yml"):
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert "$value" in rule["annotations"]["description"], rule["alert"]
        runbook = ROOT / rule["annotations"]["runbook_url"]
        assert runbook == RUNBOOKS / f"{rule['alert']}.md"


def test_provisioning_finds_the_dashboards() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    sources = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())
    assert [source["type"] for source in sources["datasources"]] == ["prometheus"]
    providers = yaml.safe_load((folder / "dashboards" / "rbln-serve.yml").read_text())
    assert [provider["type"] for provider in providers["providers"]] == ["file"]
