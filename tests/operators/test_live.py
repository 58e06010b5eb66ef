"""A real Prometheus over a real server: every expression is evaluated, and some alerts fire."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rbln_backend.reports.metrics import METRICS
from server.observability.metrics import SERVER_METRICS
from tests.architecture.source_tree import ROOT
from tests.checkpoints import CheckpointCache
from tests.debian_tools import debian_tool
from tests.operators.dashboards import DASHBOARDS, panels, variables
from tests.operators.prometheus_process import RULE_FILES, read_rules
from tests.operators.promql_names import names_of
from tests.operators.scene import Scene, bound, running_scene
from tests.operators.vendor_exporter import VENDOR_LABELS, VENDOR_METRICS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Panel -> why it may show nothing here.
MAY_BE_EMPTY = {
    "Tokens by key": "the server has no keys",
    "Refused by limits of a key": "likewise",
    "KV tiers": "the server has none",
    "KV read from prefill servers": "no server has NixlConnector",
    "Failed reads from prefill servers": "likewise",
    "Drafts accepted": "the server does not speculate",
    "Gain of steps that check drafts": "likewise",
}
# Servers with NixlConnector have them; the scene has none.
NIXL_METRICS = ("vllm:nixl_bytes_transferred_sum", "vllm:nixl_num_failed_transfers_total")
# Of Prometheus itself, and those that deploy/prometheus/prometheus.yml puts on targets.
TARGET_LABELS = {"job", "instance", "hostname", "namespace", "release", "pod"}
# What may fire on a machine that is busy with other tests.
SLOWNESS = {
    *("RblnSlowTokens", "RblnSlowFirstToken", "RblnColdCache", "RblnPadding", "RblnEventLoopLag"),
    "RblnEventLoopHeld",
}
# The burst fills the KV cache on some machines.
_PREEMPTIONS = "vllm:num_preemptions_total"


@pytest.fixture(scope="module")
def scene(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    with running_scene(checkpoints, tmp_path_factory.mktemp("scene")) as found:
        yield found


@pytest.fixture(scope="module")
def loaded(scene: Scene) -> Scene:
    calm = scene.prometheus.firing()
    assert calm <= SLOWNESS | {"RblnStartupStuck"}
    scene.load(seconds=12)
    return scene


def test_names_are_told_from_words() -> None:
    found = names_of('sum by (a) (x:y_z{b=~"c}",d!="e"}[5m]) / on (f) group_left (g) (h > 0) or 1')
    assert found.metrics == {"x:y_z": {"b", "d"}, "h": set()}
    assert found.grouped == {"a", "f", "g"}


def known_labels(scene: Scene) -> dict[str, set[str]]:
    """Every metric that there can be, and its labels."""
    known: dict[str, set[str]] = {}
    for decl in (*SERVER_METRICS, *METRICS):
        for name in _samples(decl.name, decl.kind):
            known[name] = {*decl.labels, *(("le",) if name.endswith("_bucket") else ())}
    for family in text_string_to_metric_families(scene.server.client.get("/metrics").text):
        for sample in family.samples:
            known.setdefault(sample.name, set()).update(sample.labels)
    known |= {name: set(VENDOR_LABELS) for name in VENDOR_METRICS} | {"up": set(), "rbln_up": set()}
    known |= {name: {"engine", "model_name"} for name in NIXL_METRICS}
    known["rbln_npu_device_status"] = {*VENDOR_LABELS, "state"}
    for rule in read_rules("rules.yml"):
        known[rule["record"]] = names_of(rule["expr"]).grouped | set(rule.get("labels", ()))
    return {name: labels | TARGET_LABELS for name, labels in known.items()}


def _samples(name: str, kind: str) -> tuple[str, ...]:
    if kind != "histogram":
        return (name,)
    return tuple(f"{name}{suffix}" for suffix in ("_bucket", "_sum", "_count"))


def expressions() -> list[tuple[str, str]]:
    """Every expression of dashboards, rules, alerts and runbooks, with where it stands."""
    found = [
        (f"{dashboard['uid']}: {panel['title']}", bound(target["expr"]))
        for dashboard in DASHBOARDS
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]
    for name in RULE_FILES:
        found += [
            (rule.get("alert", rule.get("record")), rule["expr"]) for rule in read_rules(name)
        ]
    for path in sorted((ROOT / "docs" / "runbooks").glob("*.md")):
        blocks = re.findall(r"```promql\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        found += [(path.name, line) for block in blocks for line in block.strip().splitlines()]
    return found


def test_every_expression_parses_and_names_what_exists(loaded: Scene) -> None:
    known = known_labels(loaded)
    wrong = []
    for where, expr in expressions():
        loaded.prometheus.now(expr)
        names = names_of(expr)
        assert names.metrics, expr
        for metric, labels in names.metrics.items():
            wrong += [f"{where}: {metric} {x}" for x in labels - known.get(metric, set())]
            wrong += [f"{where}: no {metric}"] * (metric not in known)
        anywhere = set().union(*(known.get(metric, set()) for metric in names.metrics))
        wrong += [f"{where}: nothing has {label}" for label in names.grouped - anywhere]
    assert wrong == []


def test_every_variable_has_values(loaded: Scene) -> None:
    for variable in variables():
        if variable["type"] == "query":
            metric, label = re.fullmatch(
                r"label_values\((.*), (\w+)\)", variable["definition"]
            ).groups()
            series = loaded.prometheus.now(bound(metric))
            # Kubernetes alone has namespaces.
            assert label == "namespace" or any(one["metric"].get(label) for one in series), variable


def test_every_choice_of_an_objective_is_a_bound(loaded: Scene) -> None:
    metrics = {
        "ttft": "vllm:time_to_first_token_seconds_bucket",
        "itl": "vllm:inter_token_latency_seconds_bucket",
        "e2e": "vllm:e2e_request_latency_seconds_bucket",
    }
    choices = {one["name"]: one["query"] for one in variables() if one["type"] == "custom"}
    assert choices.keys() == metrics.keys()
    for name, values in choices.items():
        for value in values.split(","):
            assert loaded.prometheus.now(f'{metrics[name]}{{le="{value}"}}'), (name, value)


def _has_data(series: list[dict[str, Any]]) -> bool:
    values = [value for one in series for value in one.get("values", [one.get("value")])]
    return any(not math.isnan(float(value[1])) for value in values)


def test_every_panel_shows_what_the_load_made(loaded: Scene) -> None:
    shown = [panel for dashboard in DASHBOARDS for panel in panels(dashboard)]
    empty = {
        panel["title"]
        for panel in shown
        for target in panel["targets"]
        if not _has_data(loaded.series(target))
    }
    assert empty <= set(MAY_BE_EMPTY)
    assert set(MAY_BE_EMPTY) <= {panel["title"] for panel in shown}


def test_our_metrics_follow_the_naming_rules(loaded: Scene) -> None:
    lines = loaded.server.client.get("/metrics").text.splitlines(keepends=True)
    ours = "".join(x for x in lines if x.startswith(("rbln_", "# HELP rbln_", "# TYPE rbln_")))
    command = [debian_tool("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=ours, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_there_is_reason(loaded: Scene) -> None:
    """The last test of this module: it ends the server."""
    prometheus = loaded.prometheus
    health = {
        rule["name"]: rule["lastError"] if "lastError" in rule else rule["health"]
        for group in prometheus.ask("rules")["groups"]
        for rule in group["rules"]
    }
    assert set(health.values()) == {"ok"}, health
    fires = 'ALERTS{{alertname="{}",alertstate="firing"}}'
    prometheus.until(fires.format("RblnOverload"))
    preempted = {"RblnPreemptions"} if prometheus.now(f"{_PREEMPTIONS} > 0") else set()
    assert prometheus.firing() <= SLOWNESS | {"RblnOverload"} | preempted

    loaded.devices.values |= {"rbln_npu_temperature": 88.0}
    loaded.devices.state = "fault"
    prometheus.until(fires.format("RblnNpuUnhealthy"))
    prometheus.until(fires.format("RblnNpuHot"))

    os.kill(loaded.server.engine_pid(), signal.SIGKILL)
    prometheus.until(fires.format("RblnTargetDown"))
    assert loaded.server.process.wait(30) != 0
