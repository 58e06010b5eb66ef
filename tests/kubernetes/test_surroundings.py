"""What stands around the pods: monitoring, scaling, gateways, the network policy."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from server.observability.metrics import ServerMetrics
from tests.debian_tools import debian_tool
from tests.kubernetes.chart import of_kind, render, server
from tests.kubernetes.value_sets import ALL_ON, GATEWAY, HPA, KEDA, POD_MONITOR
from tests.operators.prometheus_process import FOLDER
from tests.operators.promql_names import names_of

_DASHBOARDS = FOLDER.parent / "grafana" / "dashboards"


def _groups(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((FOLDER / name).read_text())["groups"]
    return found


_SCOPE = re.compile(r'namespace="serving",release="llm",')


def test_rules_are_those_of_deploy_prometheus_for_this_release(tmp_path: Path) -> None:
    files = _groups("rules.yml") + _groups("alerts.yml")
    plain = of_kind(render(POD_MONITOR), "PrometheusRule")["spec"]["groups"]
    assert [group["name"] for group in plain] == [group["name"] for group in files]
    extended = {"metrics": {"rules": {"enabled": True, "extended": True}}}
    groups = of_kind(render(extended), "PrometheusRule")["spec"]["groups"]
    files += _groups("alerts.extended.yml")
    assert [group["name"] for group in groups] == [group["name"] for group in files]
    for group, plain in zip(groups, files, strict=True):
        for rule, other in zip(group["rules"], plain["rules"], strict=True):
            assert {**rule, "expr": ""} == {**other, "expr": ""}
            metrics = names_of(rule["expr"]).metrics
            assert set(metrics) == set(names_of(other["expr"]).metrics)
            scoped = not group["name"].startswith("rbln-npu")
            for metric, labels in metrics.items():
                assert ({"namespace", "release"} <= labels) is scoped, metric
            without = _SCOPE.sub("", rule["expr"]).replace("{}", "")
            assert without.replace(",}", "}") == other["expr"]
    # With a comma at a selector's end, too, Prometheus takes them.
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": groups}))
    command = [debian_tool("promtool"), "check", "rules", str(tmp_path / "rules.yml")]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    without_devices: dict[str, Any] = copy.deepcopy(extended)
    without_devices["metrics"]["rules"]["devices"] = False
    rendered = of_kind(render(without_devices), "PrometheusRule")["spec"]["groups"]
    assert [group["name"] for group in rendered] == [
        name for group in files if not (name := group["name"]).startswith("rbln-npu")
    ]


def test_runbooks_get_an_address() -> None:
    groups = of_kind(render(ALL_ON), "PrometheusRule")["spec"]["groups"]
    links = [
        rule["annotations"]["runbook_url"] for g in groups for rule in g["rules"] if "alert" in rule
    ]
    assert "https://git.example/docs/runbooks/RblnOverload.md" in links
    assert all(link.count("https://git.example/docs/runbooks/") == 1 for link in links)


def test_dashboards_are_those_of_deploy_grafana() -> None:
    maps = [doc for doc in render(ALL_ON) if doc["kind"] == "ConfigMap"]
    assert all(doc["metadata"]["labels"]["grafana_dashboard"] == "1" for doc in maps)
    shown = _shown(ALL_ON)
    files = {p.name: json.loads(p.read_text()) for p in _DASHBOARDS.glob("*.json")}
    whole: dict[str, Any] = copy.deepcopy(ALL_ON)
    whole["metrics"]["dashboards"]["scope"] = "all"
    assert _shown(whole) == files
    for name, dashboard in shown.items():
        assert dashboard["title"] == files[name]["title"] + " (serving/llm)"
        assert dashboard["panels"] == files[name]["panels"]
        chosen = {v["name"]: v.get("current") for v in dashboard["templating"]["list"]}
        assert chosen["release"] == {"text": ["llm"], "value": ["llm"]}
        assert chosen["namespace"] == {"text": ["serving"], "value": ["serving"]}
    # Grafana's addresses: one each, at most 40 characters.
    addresses = {
        d["uid"] for d in (*shown.values(), *files.values(), *_shown(ALL_ON, "b").values())
    }
    assert len(addresses) == 3 * len(files)
    assert all(len(uid) <= 40 for uid in addresses)


def _shown(values: dict[str, Any], release: str = "llm") -> dict[str, Any]:
    maps = [doc for doc in render(values, release) if doc["kind"] == "ConfigMap"]
    return {name: json.loads(text) for doc in maps for name, text in doc["data"].items()}


def test_scrapes_have_the_labels_that_rules_and_dashboards_ask_for() -> None:
    scrape = of_kind(render(ALL_ON), "ServiceMonitor")["spec"]["endpoints"][0]
    assert (scrape["scheme"], scrape["port"]) == ("https", "https")
    assert scrape["authorization"]["credentials"] == {"name": "scrape", "key": "token"}
    targets = {item["targetLabel"]: item for item in scrape["relabelings"]}
    assert targets["job"]["replacement"] == "rbln-serve"
    assert targets["release"]["replacement"] == "llm"
    assert targets["hostname"]["sourceLabels"] == ["__meta_kubernetes_pod_node_name"]
    pods = of_kind(render(POD_MONITOR), "PodMonitor")["spec"]["podMetricsEndpoints"][0]
    assert "authorization" not in pods
    assert pods["relabelings"] == scrape["relabelings"]


def test_scaling_asks_for_metrics_that_exist(tmp_path: Path) -> None:
    scaled = of_kind(render(KEDA), "ScaledObject")["spec"]
    queries = [trigger["metadata"]["query"] for trigger in scaled["triggers"]]
    assert queries == [
        'sum(vllm:num_requests_waiting{namespace="serving",pod=~"llm-rbln-serve-[a-z0-9]+-[a-z0-9]{5}"})',
        'sum(rbln_admission_in_flight{namespace="serving",pod=~"llm-rbln-serve-[a-z0-9]+-[a-z0-9]{5}"})',
    ]
    # Another release's pods are not ours, whatever it is called.
    pods = re.compile(queries[0].partition('pod=~"')[2].partition('"})')[0])
    assert pods.fullmatch("llm-rbln-serve-7c9d8f6b5-x2v4z")
    assert not pods.fullmatch("llm-rbln-serve-b-7c9d8f6b5-x2v4z")
    assert not pods.fullmatch("llm-rbln-serve-b-0")
    assert b"rbln_admission_in_flight" in ServerMetrics(tmp_path).render()
    # The workload leaves its replicas to the scaler.
    for values in (KEDA, HPA):
        assert "replicas" not in of_kind(render(values), "Deployment")["spec"]
    hpa = of_kind(render(HPA), "HorizontalPodAutoscaler")["spec"]
    assert hpa["scaleTargetRef"]["name"] == "llm-rbln-serve"
    assert hpa["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 600


def test_the_helm_test_asks_the_service(tmp_path: Path) -> None:
    (tmp_path / "readyz").write_text("ready")
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "models").write_text('{"data": [{"id": "tiny"}]}')
    pod = of_kind(render({"service": {"port": 81}}), "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    *command, address = pod["spec"]["containers"][0]["command"]
    assert address == "http://llm-rbln-serve:81"
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as service:
        Thread(target=service.serve_forever, daemon=True).start()
        command = [sys.executable, *command[1:], f"http://127.0.0.1:{service.server_port}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        (tmp_path / "readyz").unlink()
        failed = subprocess.run(command, capture_output=True, text=True, check=False)
        service.shutdown()
    assert done.stdout == "ready: 200\nmodels: ['tiny']\n", done.stderr
    assert failed.returncode != 0


def test_gateways_let_the_api_in_alone() -> None:
    documents = render(ALL_ON)
    ingress = of_kind(documents, "Ingress")["spec"]
    paths = {path["path"] for rule in ingress["rules"] for path in rule["http"]["paths"]}
    route = of_kind(documents, "HTTPRoute")["spec"]["rules"][0]
    assert paths == {match["path"]["value"] for match in route["matches"]} == {"/v1"}
    assert route["timeouts"] == {"request": "0s"}


def test_the_route_leads_to_the_pool() -> None:
    documents = render(GATEWAY)
    pool = of_kind(documents, "InferencePool")
    backend = of_kind(documents, "HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    # The endpoint picker asks pods, not the Service: its port is theirs.
    port = server(GATEWAY).container["ports"][0]["containerPort"]
    assert pool["spec"]["targetPorts"] == [{"number": port}]


def test_pods_call_nobody_unless_told() -> None:
    policy = of_kind(render(), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []
    assert policy["ingress"] == [{"ports": [{"port": "http", "protocol": "TCP"}]}]
    strict = of_kind(render(ALL_ON), "NetworkPolicy")["spec"]
    assert strict["ingress"][0]["from"] == ALL_ON["networkPolicy"]["from"]
    assert strict["egress"] == ALL_ON["networkPolicy"]["egress"]
