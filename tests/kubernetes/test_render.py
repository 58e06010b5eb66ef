"""Value sets render to what Kubernetes takes; wrong values are refused by name."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.kubernetes.generate import CHART
from deploy.kubernetes.generate import render as render_schema
from deploy.kubernetes.values_schema import OWNED
from server.settings import ServerSettings
from tests.kubernetes.api_schemas import NEWEST, problems
from tests.kubernetes.chart import helm, notes, of_kind, pod_templates, refusal, render
from tests.kubernetes.value_sets import ALL_ON, DATA, EXTRAS, GROUPS, PLUGIN, VALUE_SETS


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
        (
            {"cache": {"prebuild": {"npuName": "RBLN-CR13"}}},
            "cache.prebuild.npuName has no effect",
        ),
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
        (
            {
                "gateway": {
                    "httpRoute": {
                        "enabled": True,
                        "backend": "InferencePool",
                        "parentRefs": [{"name": "a"}],
                    }
                }
            },
            "name one that exists",
        ),
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
    gateway = {
        "httpRoute": {"enabled": True, "backend": "InferencePool"},
        "inferencePool": {"name": "llm-pool"},
    }
    gateway["httpRoute"]["parentRefs"] = [{"name": "inference-gateway"}]
    route = of_kind(render({"gateway": gateway}), "HTTPRoute")
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == "llm-pool"


def test_the_notes_say_how_to_ask() -> None:
    assert "http://localhost:8000/v1/chat/completions" in notes()
    assert "WARNING: no auth.apiKeys" in notes()
    assert "Bearer $KEY" in notes(ALL_ON)
    assert "WARNING" not in notes(ALL_ON)
    assert "Start-up may take 1800 s" in notes()
    assert "Start-up may take 7200 s" in notes(PLUGIN)
