"""What docs/observability.md says: the dashboards with their panels, and the table of alerts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from deploy.grafana.generate import DASHBOARDS
from deploy.grafana.panel import Dashboard

_ALERTS = Path(__file__).resolve().parents[1] / "deploy" / "prometheus" / "alerts.yml"
_LABEL = re.compile(r"\{\{ \$labels\.(\w+) \}\}")
ALERT_HEADER = ("Alert", "Severity", "After", "Says")
PANEL_HEADER = ("Panel", "Shows")

SET_UP = """\
```sh
prometheus --config.file=deploy/prometheus/prometheus.yml      # edit the targets first
docker run -p 3000:3000 \\
  -v ./deploy/grafana/provisioning:/etc/grafana/provisioning:ro \\
  -v ./deploy/grafana/dashboards:/var/lib/grafana/dashboards/rbln-serve:ro grafana/grafana:10.4.0
```"""

PARAGRAPHS = (
    "`deploy/prometheus` holds a scrape configuration, recording rules and alerts, "
    "`deploy/grafana` dashboards as code, their JSON and its provisioning (Grafana 10.4 or later). "
    "What the metrics mean is in [metrics](metrics.md).",
    "The job must be called `rbln-serve`. A service with keys wants one for `/metrics` as well "
    "(`credentials_file`), unless it runs with `--open-metrics`. The dashboards read metrics "
    "alone; the alerts need `rules.yml` too. Dashboards have variables for the data source, job, "
    "instance and, where vLLM's metrics are shown, the model; the overview one more for each "
    "objective, whose choices are bounds of vLLM's histograms.",
    "**Devices.** The vendor's `rbln-metrics-exporter` (with `PROMETHEUS_METRIC_NAMES=true`) knows "
    "devices and no models. The dashboard joins it with the service: on `namespace` and `pod` "
    "where the exporter names a pod, else on `hostname`, which the scrape configuration puts on "
    "the service. Without a pod all devices of the host are shown, whoever uses them. Its job "
    "needs `honor_labels: true`. No NPU was at hand: a stand-in with the documented metrics and "
    "labels took the exporter's place in tests and pictures.",
    "**Tested.** `tests/operators` starts a real Prometheus over a real server under mixed load "
    "and evaluates every expression of dashboards, rules, alerts and runbooks: each parses, names "
    "only metrics and labels that exist, and every panel returns data, but for those that a table "
    "of the test excuses with a reason. Every alert fires and stays silent in a scenario of "
    "`tests/operators/alerts.test.yml`; some fire live. Nobody has looked at the dashboards in a "
    "running Grafana yet.",
    "**Pictures.** The pictures below are no screenshots: matplotlib drew them (see "
    "`docs/pictures.py`) from what the panels' own queries returned of a tiny model on the "
    "emulated device on a busy machine with two cores; they show what there is to see, not what is "
    "fast. Time is in seconds "
    "since the server's start.",
)


def alert_rows() -> list[tuple[str, ...]]:
    """Return a row for each alert of alerts.yml, with a link to its runbook."""
    groups = yaml.safe_load(_ALERTS.read_text(encoding="utf-8"))["groups"]
    return [_alert_row(rule) for group in groups for rule in group["rules"]]


def dashboard_parts() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return heading, picture and rows of panels of each dashboard."""
    return [
        (
            f"### {_short(dashboard)}",
            f"{dashboard.description}\n\n"
            f"![{_short(dashboard)}, drawn by matplotlib](images/{dashboard.uid}.png)",
            [(panel.title, panel.description) for panel in dashboard.panels],
        )
        for dashboard in DASHBOARDS
    ]


def _short(dashboard: Dashboard) -> str:
    return dashboard.title.removeprefix("rbln-serve / ")


def _alert_row(rule: dict[str, Any]) -> tuple[str, ...]:
    name = rule["alert"]
    severity = ", ".join(rule["labels"].values())
    says = _LABEL.sub(r"*\1*", rule["annotations"]["summary"])
    return (f"[{name}](runbooks/{name}.md)", severity, str(rule.get("for", "at once")), says)
