"""Dashboards, rules, alerts and runbooks agree with each other, without a server."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.source_tree import ROOT
from tests.debian_tools import debian_tool
from tests.operators.dashboards import DASHBOARDS, FILES, panels
from tests.operators.prometheus_process import FOLDER, RULE_FILES, read_rules

SCENARIOS = Path(__file__).with_name("alerts.test.yml")
RUNBOOKS = ROOT / "docs" / "runbooks"
RULES = [*read_rules("alerts.yml"), *read_rules("alerts.extended.yml")]
ALERTS = {rule["alert"] for rule in RULES}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda d: str(d["uid"]))
def test_panels_lie_side_by_side_and_are_described(dashboard: dict[str, Any]) -> None:
    used: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        # Grafana's grid has 24 columns.
        assert grid["x"] + grid["w"] <= 24, panel["title"]
        cells = {
            (grid["x"] + column, grid["y"] + line)
            for column in range(grid["w"])
            for line in range(grid["h"])
        }
        assert not cells & used, panel["title"]
        used |= cells
        assert panel["type"] == "row" or panel["description"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    titles = [panel["title"] for panel in panels(dashboard)]
    assert len(set(titles)) == len(titles)


def test_dashboards_have_the_addresses_of_their_files() -> None:
    assert [path.stem for path in FILES] == [dashboard["uid"] for dashboard in DASHBOARDS]


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", str(FOLDER / "prometheus.yml")),
        ("check", "rules", *(str(FOLDER / name) for name in RULE_FILES)),
    ],
    ids=lambda a: " ".join(a[:2]),
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    promtool(*arguments)


def promtool(*arguments: str) -> None:
    command = [debian_tool("promtool"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_alerts_do_what_their_scenarios_say(tmp_path: Path) -> None:
    """Each beside the recorded rules alone: evaluating all of them takes three times as long."""
    scenarios = yaml.safe_load(SCENARIOS.read_text(encoding="utf-8"))
    by_alert: dict[str, list[Any]] = {}
    for test in scenarios["tests"]:
        by_alert.setdefault(test["name"].split()[0], []).append(test)
    for alert, tests in by_alert.items():
        own = [rule for rule in RULES if rule["alert"] == alert]
        rules = tmp_path / f"{alert}.yml"
        groups = [{"name": "rules", "rules": [*read_rules("rules.yml"), *own]}]
        rules.write_text(yaml.safe_dump({"groups": groups}))
        alone = {**scenarios, "rule_files": [str(rules)], "tests": tests}
        rules.with_suffix(".test").write_text(yaml.safe_dump(alone))
    promtool("test", "rules", *map(str, tmp_path.glob("*.test")))


def test_each_alert_fires_and_is_silent_in_a_scenario() -> None:
    tests = yaml.safe_load(SCENARIOS.read_text(encoding="utf-8"))["tests"]
    names = {test["name"] for test in tests}
    for alert in ALERTS:
        assert {f"{alert} fires", f"{alert} is silent"} <= names


def test_each_alert_is_documented() -> None:
    assert {path.stem for path in RUNBOOKS.glob("Rbln*.md")} == ALERTS
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert "$value" in rule["annotations"]["description"], rule["alert"]
        runbook = ROOT / rule["annotations"]["runbook_url"]
        assert runbook == RUNBOOKS / f"{rule['alert']}.md"
