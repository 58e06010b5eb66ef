"""Value sets render to what Kubernetes takes; wrong values are refused by name."""

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

import pytest
import yaml

from deploy.kubernetes.generate import CHART
from deploy.kubernetes.generate import render as render_schema
from deploy.kubernetes.values_schema import OWNED
from server.observability.metrics import ServerMetrics
from server.settings import ServerSettings
from tests.debian_tools import debian_tool
from tests.kubernetes.api_schemas import NEWEST, problems
from tests.kubernetes.chart import helm, notes, of_kind, pod_templates, refusal, render, server
from tests.kubernetes.value_sets import (
    ALL_ON,
    DATA,
    EXTRAS,
    GATEWAY,
    GROUPS,
    HPA,
    KEDA,
    PLUGIN,
    POD_MONITOR,
    VALUE_SETS,
)
from tests.operators.dashboards import names_of
from tests.operators.prometheus_process import FOLDER


@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_set_is_valid_in_kubernetes(name: str) -> None:
    values, oldest = VALUE_SETS[name]
    documents = render(values)
    for version in (oldest, NEWEST):
        assert [line for doc in documents for line in problems(doc, version)] == []
    names = [(doc["kind"], doc["metadata"]["name"]) for doc in documents]
    assert len(names) == len(set(names))
    assert all(doc["metadata"]["namespace"] == "serving" for doc in documents)


@pytest.mark.parametrize("name", VALUE_SETS)
def test_lint_finds_nothing(name: str) -> None:
    report = helm().lint(str(CHART), VALUE_SETS[name][0], strict=True)
    found = [message["error"] for message in report["messages"]]
    # We have no picture to show.
    assert [text for text in found if text != "icon is recommended"] == []
    assert report["errors"] == []


def test_what_clients_leave_has_a_volume() -> None:
    spec = of_kind(render(DATA), "StatefulSet")["spec"]
    assert spec["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Retain"
    (claim,) = spec["volumeClaimTemplates"]
    assert (claim["metadata"]["name"], claim["spec"]["storageClassName"]) == ("data", "fast")
    (container,) = spec["template"]["spec"]["containers"]
    places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert str(variables["RBLN_SERVE_DATA_DIR"]).startswith(places["data"] + "/")
    for change in ({"kind": "Deployment"}, {"replicas": 2}):
        wrong = {**DATA, "workload": {**DATA["workload"], **change}}
        assert "a store belongs to one server" in refusal(wrong)


def test_what_users_add_is_there_once_and_beside_the_charts_own() -> None:
    spec = of_kind(render(EXTRAS), "Deployment")["spec"]["template"]["spec"]
    server, syncer = spec["containers"]
    variables = [one["name"] for one in server["env"]]
    assert len(variables) == len(set(variables))
    values = {one["name"]: one.get("value") for one in server["env"]}
    assert (values["HF_HUB_OFFLINE"], values["HOME"]) == ("0", "/models")
    assert "HF_TOKEN" in variables
    assert server["envFrom"] == EXTRAS["extraEnvFrom"]
    assert [port["name"] for port in server["ports"]] == ["http", "kv-events"]
    (rule,) = of_kind(render(EXTRAS), "NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == ["http", 5557]
    mine = {**EXTRAS, "extraEnv": [{"name": "VLLM_CACHE_ROOT", "value": "/kv"}]}
    env = of_kind(render(mine), "Deployment")["spec"]["template"]["spec"]["containers"][0]["env"]
    found = [one["value"] for one in env if one["name"] == "VLLM_CACHE_ROOT"]
    assert found == ["/kv"]
    assert {"/weights", "/kv"} < {mount["mountPath"] for mount in server["volumeMounts"]}
    assert {"weights", "kv"} < {volume["name"] for volume in spec["volumes"]}
    assert (syncer["name"], spec["initContainers"][0]["name"]) == ("syncer", "download")
    with_cache = {**EXTRAS, "cache": ALL_ON["cache"]}
    names = of_kind(render(with_cache), "Deployment")["spec"]["template"]["spec"]["initContainers"]
    assert [one["name"] for one in names] == ["download", "import-cache", "wait-for-cache"]
    group = render({**GROUPS, "extraContainers": EXTRAS["extraContainers"]})
    pod = pod_templates(group)["leader"]["spec"]
    assert [one["name"] for one in pod["containers"]] == ["server", "syncer"]


def test_the_check_itself_finds_what_is_wrong() -> None:
    for kind, spoil in {
        "Deployment": lambda spec: spec["template"]["spec"].update(restartPolcy="Always"),
        "PrometheusRule": lambda spec: spec["groups"][0]["rules"][0].pop("expr"),
        "NetworkPolicy": lambda spec: spec.update(ingress="all"),
    }.items():
        document = copy.deepcopy(of_kind(render(ALL_ON), kind))
        assert problems(document, NEWEST) == []
        spoil(document["spec"])
        assert problems(document, NEWEST) != []
    group = copy.deepcopy(of_kind(render(GROUPS), "LeaderWorkerSet"))
    leader = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    leader["spec"]["containers"][0]["ports"] = "8000"
    assert problems(group, NEWEST) != []


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"replicaCount": 2}, "additional properties 'replicaCount' not allowed"),
        ({"workload": {"replica": 2}}, "additional properties 'replica' not allowed"),
        ({"workload": {"kind": "DaemonSet"}}, "/workload/kind"),
        ({"settings": {"max_inflight": 2}}, "additional properties 'max_inflight' not allowed"),
        ({"settings": {"max_queue_s": -1}}, "/settings/max_queue_s"),
        ({"settings": {"port": 80}}, "additional properties 'port' not allowed"),
        ({"settings": {"api_key": ["k"]}}, "additional properties 'api_key' not allowed"),
        ({"engine": {"env": {"VLLM_API_KEY": "k"}}}, "invalid propertyName 'VLLM_API_KEY'"),
        ({"engine": {"env": {"RBLN_SERVE_PORT": "1"}}}, "RBLN_SERVE_PORT"),
        ({"engine": {"args": "--max-num-seqs 4"}}, "/engine/args"),
        ({"device": {"kind": "gpu"}}, "/device/kind"),
        ({"device": {"resource": "nvidia.com/gpu"}}, "/device/resource"),
        ({"probes": {"startup": {"periodSeconds": 0}}}, "/probes/startup/periodSeconds"),
        ({"shutdown": {"stopSeconds": 5}}, "/shutdown/stopSeconds"),
        ({"cache": {"import": {"digest": "md5:1"}}}, "/cache/import/digest"),
        ({"model": {"volume": {"pvc": "a"}}}, "additional properties 'pvc' not allowed"),
        (
            {"model": {"volume": {"nfs": {"server": "a", "path": "/"}, "hostPath": {"path": "/"}}}},
            "/model/volume",
        ),
        ({"metrics": {"serviceMonitor": {"interval": "15"}}}, "/metrics/serviceMonitor/interval"),
    ],
)
def test_the_schema_refuses(values: dict[str, Any], says: str) -> None:
    assert says in refusal(values)


_SCRAPED = {"serviceMonitor": {"enabled": True}}
_KEYED = {"apiKeys": {"secretName": "keys"}}
_POOL_ROUTE = {"enabled": True, "backend": "InferencePool", "parentRefs": [{"name": "a"}]}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"metrics": {**_SCRAPED, "podMonitor": {"enabled": True}}}, "enable one"),
        ({"metrics": _SCRAPED, "auth": _KEYED}, "metrics.bearerSecret.name"),
        ({"autoscaling": {"kind": "keda"}}, "prometheusAddress is needed"),
        ({"autoscaling": {"minReplicas": 9}}, "minReplicas 9 is more than"),
        ({"cache": {"import": {"enabled": True}}}, "cache.import needs file"),
        ({"cache": {"prebuild": {"enabled": True}}}, "set cache.persistence.enabled"),
        (
            {
                "workload": {"kind": "StatefulSet"},
                "cache": {"prebuild": {"enabled": True}, "persistence": {"enabled": True}},
            },
            "cannot fill the claims of a StatefulSet",
        ),
        ({"cache": {"prebuild": {"npuName": "RBLN-CR13"}}}, "cache.prebuild.npuName has no effect"),
        (
            {**GROUPS, "cache": {"persistence": {"enabled": True}, "prebuild": {"enabled": True}}},
            "ranks of several pods compile with Ray",
        ),
        ({"model": {"download": {"repository": "a/b"}}}, "needs a rule in networkPolicy.egress"),
        ({"model": {"download": {"revision": "b"}}}, "without model.download.repository"),
        (
            {"model": {"download": {"repository": "a/b"}, "volume": {"hostPath": {"path": "/m"}}}},
            "would both be mounted at /models",
        ),
        (
            {"resources": {"limits": {"memory": "2000Mi"}}},
            "limits.memory 2000Mi is less than memory.base 1Gi and shmSize 1Gi",
        ),
        ({"workload": {"maxSurge": 0}}, "a rollout could not begin"),
        ({"ingress": {"enabled": True}}, "ingress.hosts is empty"),
        ({"gateway": {"httpRoute": {"enabled": True}}}, "name the Gateway"),
        ({"gateway": {"inferencePool": {"enabled": True}}}, "the endpoint picker"),
        ({"gateway": {"httpRoute": _POOL_ROUTE}}, "name one that exists"),
        ({"adapters": {"modules": {"a": "/adapters/a"}}}, "without adapters.enabled"),
    ],
)
def test_combinations_that_cannot_work_are_refused(values: dict[str, Any], says: str) -> None:
    assert says in refusal(values)


def test_the_schema_is_fresh_and_knows_every_setting() -> None:
    written = (CHART / "values.schema.json").read_text(encoding="utf-8")
    assert written == render_schema(), "run `make chart`"
    settings = json.loads(written)["properties"]["settings"]["properties"]
    assert set(settings) | set(OWNED) == set(ServerSettings.model_fields)
    assert not set(settings) & set(OWNED)


def test_a_package_carries_rules_and_dashboards_itself(tmp_path: Path) -> None:
    archive = helm().package(str(CHART), destination=str(tmp_path))
    with helm().Chart.load(archive) as packed:
        files = {item["name"] for item in packed.files}
        assert packed.metadata["appVersion"] == packed.version
    assert {"files/rules.yml", "files/alerts.yml", "files/alerts.extended.yml"} <= files
    assert "files/dashboards/rbln-overview.json" in files


def test_the_examples_of_the_page_can_be_installed() -> None:
    page = (CHART.parents[2] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    blocks = re.findall(
        r"^```yaml\n(.+?)^```", page.replace("…", "0" * 64), re.MULTILINE | re.DOTALL
    )
    examples = [block for text in blocks if "rules" not in (block := yaml.safe_load(text))]
    assert len(examples) == 6
    for values in examples:
        assert [x for doc in render(values) for x in problems(doc, NEWEST)] == []
    # Those of the shell: what they name exists.
    assert "gateway.inferencePool.name" in page
    gateway = {"httpRoute": _POOL_ROUTE, "inferencePool": {"name": "llm-pool"}}
    route = of_kind(render({"gateway": gateway}), "HTTPRoute")
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == "llm-pool"


def test_the_notes_say_how_to_ask() -> None:
    assert "http://localhost:8000/v1/chat/completions" in notes()
    assert "WARNING: no auth.apiKeys" in notes()
    assert "Bearer $KEY" in notes(ALL_ON)
    assert "WARNING" not in notes(ALL_ON)
    assert "Start-up may take 1800 s" in notes()
    assert "Start-up may take 7200 s" in notes(PLUGIN)


# ------------------------------------------------------------------------------------- surroundings
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
    # Runbooks get an address.
    groups = of_kind(render(ALL_ON), "PrometheusRule")["spec"]["groups"]
    rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    links = [rule["annotations"]["runbook_url"] for rule in rules]
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


def test_gateways_let_the_api_in_alone_and_lead_to_the_pool() -> None:
    documents = render(ALL_ON)
    ingress = of_kind(documents, "Ingress")["spec"]
    paths = {path["path"] for rule in ingress["rules"] for path in rule["http"]["paths"]}
    route = of_kind(documents, "HTTPRoute")["spec"]["rules"][0]
    assert paths == {match["path"]["value"] for match in route["matches"]} == {"/v1"}
    assert route["timeouts"] == {"request": "0s"}
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
