"""What the pods are: their times, security, devices, volumes and settings."""

import copy
import json
import subprocess
from typing import Any

import pytest
import yaml

import server.service as service
from deploy.kubernetes.generate import CHART
from server import bounds
from server.settings import ServerSettings, SettingsError, load_settings
from tests.kubernetes.api_schemas import NEWEST, problems
from tests.kubernetes.chart import Document, of_kind, pod_templates, refusal, render, server
from tests.kubernetes.value_sets import (
    ALL_ON,
    DRA,
    GROUPS,
    KEYS,
    NAMED_NPU,
    PLUGIN,
    STATEFUL,
    VALUE_SETS,
)

RESTRICTED = VALUE_SETS["extras"][0]["extraContainers"][0]["securityContext"]
# Of the restricted Pod Security Standard, and image volumes.
_VOLUMES = {"emptyDir", "persistentVolumeClaim", "secret", "image"}


def containers(pod: Document) -> list[Document]:
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize(
    ("propagation", "drain", "stop"), [(10, 25, 15), (0, 0, 12), (5, 600, 30), (7, 1, 13)]
)
def test_the_grace_period_is_what_an_end_may_take(propagation: int, drain: int, stop: int) -> None:
    times = {"propagationSeconds": propagation, "drainTimeoutSeconds": drain, "stopSeconds": stop}
    given = server({"shutdown": times})
    assert given.env["RBLN_SERVE_DRAIN_TIMEOUT_S"] == str(drain)
    slept = given.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
    assert slept.get("seconds", 0) == propagation
    grace_s = given.pod["terminationGracePeriodSeconds"]
    assert grace_s == propagation + drain + stop
    # After the drain: the engine's stop, and the last of uvicorn.
    assert grace_s > propagation + drain + service._ENGINE_STOP_S + 1


@pytest.mark.parametrize(("budget", "period"), [(1800, 5), (1, 1), (7215, 30), (100, 7), (3, 10)])
def test_a_probe_never_gives_up_before_its_budget(budget: int, period: int) -> None:
    startup = {"budgetSeconds": budget, "periodSeconds": period}
    liveness = {"hungAfterSeconds": max(10, budget), "periodSeconds": period}
    given = server({"probes": {"startup": startup, "liveness": liveness}})
    assert budget <= given.patience_s("startup") < budget + period
    assert max(10, budget) <= given.patience_s("liveness") < max(10, budget) + period
    probes = {"startup": "/startupz", "readiness": "/readyz", "liveness": "/livez"}
    assert {p: given.container[f"{p}Probe"]["httpGet"]["path"] for p in probes} == probes


def test_times_of_the_chart_fit_those_of_the_server() -> None:
    default = ServerSettings.model_fields["drain_timeout_s"].default
    assert float(server().env["RBLN_SERVE_DRAIN_TIMEOUT_S"]) == default
    # A dying server ends by itself before liveness acts.
    assert server().patience_s("liveness") > bounds.DEATH_LINGER_S


def test_a_roll_is_given_the_time_of_its_slowest_pod() -> None:
    spec = of_kind(render(ALL_ON), "Deployment")["spec"]
    # Image, import, waiting for the pre-build, start, and minReadySeconds.
    assert spec["progressDeadlineSeconds"] == 600 + 300 + 1800 + 1800 + 5
    assert of_kind(render(), "Deployment")["spec"]["progressDeadlineSeconds"] == 600 + 1800


@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_pod_is_restricted(name: str) -> None:
    for template in pod_templates(render(VALUE_SETS[name][0])).values():
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for container in containers(pod):
            assert container["securityContext"] == RESTRICTED
            assert container["volumeMounts"]
        if name != "all-on":  # which has an NFS volume
            kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
            assert kinds <= _VOLUMES


def test_the_server_takes_the_rendered_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    values = copy.deepcopy(ALL_ON)
    values["settings"] |= {"max_body_bytes": 4194304, "max_queue_s": 0, "unknown_fields": "warn"}
    for name, value in server(values).env.items():
        monkeypatch.setenv(name, value)
    settings = load_settings({}, {})
    # Kubernetes would set this for a Service called rbln-serve.
    assert all(t["spec"]["enableServiceLinks"] is False for t in pod_templates(render()).values())
    monkeypatch.setenv("RBLN_SERVE_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(SettingsError, match="RBLN_SERVE_SERVICE_HOST"):
        load_settings({}, {})
    assert settings.max_body_bytes == 4194304
    assert settings.max_in_flight == 64
    assert settings.lora_base_names == ("a", "b")
    assert settings.max_n == 2
    assert settings.max_queue_s == 0
    assert settings.unknown_fields == "warn"
    assert settings.enable_ssl_refresh
    assert (settings.port, settings.drain_timeout_s) == (8000, 25)
    assert str(settings.api_key_file) == "/etc/rbln-serve/api-keys/keys"


def test_secrets_are_files_that_can_change() -> None:
    given = server(KEYS)
    mounts = {mount["mountPath"]: mount for mount in given.container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in given.pod["volumes"]}
    for setting in ("API_KEY_FILE", "ADMIN_KEY_FILE", "SSL_CERTFILE", "SSL_KEYFILE"):
        folder = given.env[f"RBLN_SERVE_{setting}"].rpartition("/")[0]
        # A subPath would keep what was there when the pod started.
        assert "subPath" not in mounts[folder]
        assert mounts[folder]["readOnly"] is True
        assert volumes[mounts[folder]["name"]]["secret"]["defaultMode"] == 0o440
    for template in pod_templates(render(ALL_ON)).values():
        assert "secretKeyRef" not in str(template)
    assert "keys" not in str(pod_templates(render(ALL_ON))["Job"])
    assert of_kind(render(KEYS), "Service")["spec"]["ports"][0]["name"] == "https"
    assert given.container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"


def test_npus_of_the_device_plugin() -> None:
    given = server(PLUGIN)
    assert given.env["VLLM_RBLN_DEVICE"] == "rebel"
    for container in containers(given.pod):
        assert container["resources"]["limits"]["rebellions.ai/ATOM"] == "4"
    terms = given.pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    for term, zone in zip(terms["nodeSelectorTerms"], "ab", strict=True):
        wanted = {item["key"]: item["values"] for item in term["matchExpressions"]}
        assert wanted == {
            "rebellions.ai/npu.present": ["true"],
            "rebellions.ai/npu.family": ["ATOM"],
            "rebellions.ai/npu.product": ["RBLN-CA25"],
            "zone": [zone],
        }
    assert "affinity" not in server().pod


def test_npus_of_the_dra_driver() -> None:
    documents = render(DRA)
    template = of_kind(documents, "ResourceClaimTemplate")
    request = template["spec"]["spec"]["devices"]["requests"][0]["exactly"]
    assert (request["deviceClassName"], request["count"]) == ("npu.rebellions.ai", 2)
    assert template["spec"]["spec"]["devices"]["constraints"] == [
        {"requests": ["npu"], "matchAttribute": "npu.rebellions.ai/productName"}
    ]
    given = server(DRA)
    claim = {"name": "npu", "resourceClaimTemplateName": template["metadata"]["name"]}
    assert given.pod["resourceClaims"] == [claim]
    for container in containers(given.pod):
        assert container["resources"]["claims"] == [{"name": "npu"}]
    mine = render({**DRA, "device": {**DRA["device"], "claimTemplate": "mine"}})
    assert all(doc["kind"] != "ResourceClaimTemplate" for doc in mine)


def test_the_cache_is_filled_before_the_server_starts() -> None:
    documents = render(ALL_ON)
    given = server(ALL_ON)
    first, second = given.pod["initContainers"]
    assert first["args"] == ["cache", "import", "/bundle/a/b.bundle"]
    assert second["args"] == given.container["args"]
    job = of_kind(documents, "Job")["spec"]["template"]["spec"]["containers"][0]
    # The same model, flags and environment, or it would be another cache key.
    assert job["args"] == ["compile", *given.container["args"]]
    assert job["env"] == second["env"]
    for container in (first, job):
        # What they write is for the group that the server is in, too.
        shell = container["command"][2].replace("exec rbln-serve", "umask; printf '%s '")
        ran = subprocess.run(
            [*container["command"][:2], shell, *container["command"][3:], *container["args"]],
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.split() == ["0002", *container["args"]]
    for container in (first, second, job):
        cache = [mount for mount in container["volumeMounts"] if mount["name"] == "cache"]
        assert "readOnly" not in cache[0]
    digest = server(DRA).pod["initContainers"][0]["args"]
    assert digest[3:] == ["--digest", "sha256:" + "0" * 64]


def test_a_named_npu_is_compiled_for_without_one() -> None:
    templates = pod_templates(render(NAMED_NPU))
    job = templates["Job"]["spec"]
    env = {item["name"]: item["value"] for item in job["containers"][0]["env"]}
    assert env["RBLN_FORCE_NPU_NAME"] == "RBLN-CA25"
    assert env["VLLM_RBLN_DEVICE"] == "rebel"
    assert "rebellions.ai/ATOM" not in job["containers"][0]["resources"]["limits"]
    assert "npu.present" not in str(job.get("affinity"))
    # The pods, which have NPUs, wait for it.
    (waiting,) = templates["Deployment"]["spec"]["initContainers"]
    assert waiting["name"] == "wait-for-cache"
    assert waiting["resources"]["limits"]["rebellions.ai/ATOM"] == "4"
    # Another image makes another Job.
    one, same, other = (
        of_kind(render({**NAMED_NPU, "image": {"tag": tag}}), "Job")["metadata"]["name"]
        for tag in ("1", "1", "2")
    )
    assert one == same != other


def test_replicas_of_a_stateful_set_keep_their_caches() -> None:
    documents = render(STATEFUL)
    spec = of_kind(documents, "StatefulSet")["spec"]
    claim = spec["volumeClaimTemplates"][0]
    assert claim["metadata"]["name"] == "cache"
    assert claim["spec"]["storageClassName"] == "fast"
    assert all(doc["kind"] != "PersistentVolumeClaim" for doc in documents)
    assert "cache" not in {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    names = [doc["metadata"]["name"] for doc in documents if doc["kind"] == "Service"]
    assert spec["serviceName"] in names
    args = spec["template"]["spec"]["containers"][0]["args"]
    assert args[-3:] == ["--enable-lora", "--lora-modules", "formal=/adapters/formal"]


def test_selectors_find_servers_and_no_jobs() -> None:
    documents = render(ALL_ON)
    templates = pod_templates(documents)
    # More than one replica has a budget.
    assert of_kind(documents, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert of_kind(render({"workload": {"replicas": 2}}), "PodDisruptionBudget")
    assert all(doc["kind"] != "PodDisruptionBudget" for doc in render())
    wanted: dict[str, Any] = of_kind(documents, "PodDisruptionBudget")["spec"]["selector"]
    assert wanted == of_kind(documents, "ServiceMonitor")["spec"]["selector"]
    assert wanted == of_kind(documents, "Deployment")["spec"]["selector"]
    labels = {name: template["metadata"]["labels"] for name, template in templates.items()}
    assert wanted["matchLabels"].items() <= labels["Deployment"].items()
    assert not wanted["matchLabels"].items() <= labels["Job"].items()


# ------------------------------------------------------------------------------------------ presets
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
        "--distributed-executor-backend",
        "ray",
        "--tensor-parallel-size",
        "8",
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
    role = {**GROUPS, "prefillDecode": {"role": "prefill"}}
    assert "needs workload.kind Deployment or StatefulSet" in refusal(role)
    # Emulated devices are counted for Ray.
    templates = pod_templates(render({**GROUPS, "device": {"kind": "emulated", "count": 2}}))
    for name in ("leader", "members"):
        start = templates[name]["spec"]["containers"][0]["command"][2]
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


# --------------------------------------------------------------------------------------------- sums
_NPUS = {"device": {"kind": "plugin", "count": 4}}


@pytest.mark.parametrize(
    ("values", "limit", "request_"),
    [
        ({}, "4096Mi", "4096Mi"),
        (_NPUS, "10240Mi", "10240Mi"),
        ({"memory": {"model": "16G"}, "shmSize": "512Mi"}, "18843Mi", "18843Mi"),
        ({"memory": {"base": "1500M", "perDevice": "0.5Gi"}}, "2967Mi", "2967Mi"),
        ({"resources": {"limits": {"memory": "8Gi"}}}, "8Gi", "8Gi"),
        ({"resources": {"requests": {"memory": "6Gi"}}}, "6Gi", "6Gi"),
        (
            {"resources": {"requests": {"memory": "3Gi"}, "limits": {"memory": "9Gi"}}},
            "9Gi",
            "3Gi",
        ),
    ],
)
def test_memory_holds_every_rank_and_shared_memory(
    values: dict[str, Any], limit: str, request_: str
) -> None:
    resources = server(values).container["resources"]
    assert (resources["limits"]["memory"], resources["requests"]["memory"]) == (limit, request_)


@pytest.mark.parametrize(
    ("values", "threads"),
    [
        ({}, "2"),
        ({"resources": {"requests": {"cpu": "500m"}}}, "1"),
        ({**_NPUS, "resources": {"requests": {"cpu": 16}}}, "4"),
        ({**_NPUS, "resources": {"requests": {"cpu": "7.5"}}}, "1"),
        # A limit is a quota, which the server reads.
        ({"resources": {"limits": {"cpu": "8"}}}, None),
        ({"resources": {"requests": {"cpu": None}}}, None),
        ({"engine": {"env": {"RBLN_NUM_THREADS": "3"}}}, "3"),
        ({"engine": {"env": {"OMP_NUM_THREADS": "3"}}}, None),
    ],
)
def test_threads_are_those_of_the_request(values: dict[str, Any], threads: str | None) -> None:
    assert server(values).env.get("RBLN_NUM_THREADS") == threads


def test_npus_need_the_image_with_the_sdk() -> None:
    def image(**values: Any) -> str:
        return str(server(values).container["image"])

    assert image() == "rbln-serve:0.3.0"
    assert image(device={"kind": "plugin"}) == "rbln-serve:0.3.0-npu"
    assert image(device={"kind": "dra"}) == "rbln-serve:0.3.0-npu"
    assert image(device={"kind": "plugin"}, image={"tag": "1"}) == "rbln-serve:1"


def test_a_cold_start_of_npus_has_more_time() -> None:
    assert server().patience_s("startup") == 1800
    assert server({"device": {"kind": "dra"}}).patience_s("startup") == 7200
    mine = {**_NPUS, "probes": {"startup": {"budgetSeconds": 900}}}
    assert server(mine).patience_s("startup") == 900
    deadline = of_kind(render(PLUGIN), "Deployment")["spec"]["progressDeadlineSeconds"]
    # Image, compiling in the init container, start.
    assert deadline == 600 + 7200 + 7200


def test_pods_with_npus_compile_themselves() -> None:
    """A Job would wait for the NPUs of the pods that wait for it."""
    documents = render(PLUGIN)
    assert all(doc["kind"] != "Job" for doc in documents)
    (builder,) = server(PLUGIN).pod["initContainers"]
    assert builder["name"] == "build-cache"
    assert builder["resources"]["limits"]["rebellions.ai/ATOM"] == "4"
    assert builder["args"] == server(PLUGIN).container["args"]
    (cache,) = [mount for mount in builder["volumeMounts"] if mount["name"] == "cache"]
    assert "readOnly" not in cache
    # Each replica of a StatefulSet fills its own claim.
    stateful = {**PLUGIN, "workload": {"kind": "StatefulSet"}}
    assert server(stateful).pod["initContainers"][0]["name"] == "build-cache"
    assert of_kind(render(NAMED_NPU), "Job")
