"""LeaderWorkerSet, and the values for llm-d with one role and with two."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from deploy.kubernetes.generate import CHART
from tests.kubernetes.api_schemas import NEWEST, problems
from tests.kubernetes.chart import of_kind, pod_templates, refusal, render
from tests.kubernetes.value_sets import GROUPS

LLM_D: dict[str, Any] = yaml.safe_load((CHART.parent / "presets" / "llm-d.yaml").read_text())


def test_a_group_is_one_model_over_several_pods() -> None:
    documents = render(GROUPS)
    group = of_kind(documents, "LeaderWorkerSet")["spec"]
    assert (group["replicas"], group["leaderWorkerTemplate"]["size"]) == (2, 2)
    templates = pod_templates(documents)
    leader = templates["leader"]["spec"]["containers"][0]
    member = templates["members"]["spec"]["containers"][0]
    assert leader["command"][2].endswith('exec rbln-serve serve "$@"')
    assert leader["args"][-4:] == [
        *("--distributed-executor-backend", "ray"),
        *("--tensor-parallel-size", "8"),
    ]
    assert "$LWS_LEADER_ADDRESS:6379" in member["command"][2]
    # Eight ranks: four NPUs in each pod, and memory for them.
    for container in (leader, member):
        assert container["resources"]["limits"]["rebellions.ai/npu"] == "4"
        assert container["resources"]["limits"]["memory"] == "10240Mi"
    selector = of_kind(documents, "Service")["spec"]["selector"].items()
    assert selector <= templates["leader"]["metadata"]["labels"].items()
    assert not selector <= templates["members"]["metadata"]["labels"].items()
    # Ranks reach each other at any port.
    policy = of_kind(documents, "NetworkPolicy")["spec"]
    assert any("ports" not in rule for rule in policy["ingress"])
    assert "replicas of a LeaderWorkerSet" in refusal({**GROUPS, "autoscaling": {"kind": "hpa"}})


def test_emulated_devices_are_counted_for_ray() -> None:
    values = {**GROUPS, "device": {"kind": "emulated", "count": 2}}
    for template in (pod_templates(render(values))[name] for name in ("leader", "members")):
        start = template["spec"]["containers"][0]["command"][2]
        assert "--resources='{\"RBLN\": 2}'" in start


def test_workers_run_engines_without_an_api() -> None:
    values = {
        **{name: value for name, value in GROUPS.items() if name != "engine"},
        "ray": {"workers": 2},
        "headless": {"enginesPerPod": 4},
    }
    documents = render(values)
    assert [x for doc in documents for x in problems(doc, NEWEST)] == []
    templates = pod_templates(documents)
    leader, member = (templates[x]["spec"]["containers"][0] for x in ("leader", "members"))
    shared = "--data-parallel-size 12 --data-parallel-size-local 4 --data-parallel-rpc-port 13345"
    for container in (leader, member):
        assert shared in container["command"][2]
        assert "ray" not in container["args"]
    assert leader["command"][2].endswith('--data-parallel-address "$LEADER_POD_IP"')
    assert "LEADER_POD_IP" in [one["name"] for one in leader["env"]]
    start = "--headless --data-parallel-start-rank $((LWS_WORKER_INDEX * 4))"
    assert member["command"][2].endswith(f'--data-parallel-address "$LWS_LEADER_ADDRESS" {start}')
    # A headless server has the probes of every server.
    assert member["readinessProbe"] == leader["readinessProbe"]
    wrong = {"headless": {"enginesPerPod": 1}}
    assert "needs workload.kind LeaderWorkerSet" in refusal(wrong)


def test_llm_d_finds_what_it_routes_by() -> None:
    documents = render(LLM_D)
    assert [x for doc in documents for x in problems(doc, NEWEST)] == []
    pod = of_kind(documents, "Deployment")["spec"]["template"]
    assert pod["metadata"]["labels"]["llm-d.ai/role"] == "both"
    container = pod["spec"]["containers"][0]
    config = json.loads(container["args"][container["args"].index("--kv-events-config") + 1])
    # Kubernetes replaces $(POD_IP) by the variable of the same container.
    assert config["topic"] == "kv@$(POD_IP):8000@default-model"
    assert "POD_IP" in [one["name"] for one in container["env"]]
    port = config["endpoint"].rpartition(":")[2]
    assert port in [str(one["containerPort"]) for one in container["ports"]]
    (rule,) = of_kind(documents, "NetworkPolicy")["spec"]["ingress"]
    assert port in [str(one["port"]) for one in rule["ports"]]
    assert "kv_role" not in str(documents)


def role_values(role: str) -> dict[str, Any]:
    """Return the values of two files, as Helm merges them."""
    own = yaml.safe_load((CHART.parent / "presets" / f"llm-d-{role}.yaml").read_text())
    merged = {**LLM_D, **own, "podLabels": {**LLM_D["podLabels"], **own["podLabels"]}}
    merged["device"] = {**LLM_D["device"], **own["device"]}
    return merged


@pytest.mark.parametrize(
    ("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")]
)
def test_llm_ds_roles_exchange_kv(role: str, kv_role: str) -> None:
    documents = render(role_values(role), role)
    assert [x for doc in documents for x in problems(doc, NEWEST)] == []
    template = of_kind(documents, "Deployment")["spec"]["template"]
    assert template["metadata"]["labels"]["llm-d.ai/role"] == role
    container = template["spec"]["containers"][0]
    config = json.loads(container["args"][container["args"].index("--kv-transfer-config") + 1])
    assert config == {"kv_connector": "NixlConnector", "kv_role": kv_role}
    env = {one["name"]: one for one in container["env"]}
    host = env["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert (host, env["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"]) == ("status.podIP", "5600")
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports["nixl"] == 5600
    assert env["RBLN_SERVE_PORT"]["value"] == str(ports["http"])
    # Any port between the pods of both releases, whose instance labels differ.
    policy = of_kind(documents, "NetworkPolicy")["spec"]
    peers = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "rbln-serve"}}}]
    assert {"from": peers} in policy["ingress"]
    assert {"to": peers} in policy["egress"]


def test_a_role_that_cannot_work_is_refused() -> None:
    group = {**GROUPS, "prefillDecode": {"role": "prefill"}}
    assert "needs workload.kind Deployment or StatefulSet" in refusal(group)
