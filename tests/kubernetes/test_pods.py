"""What the pods are: their times, security, devices, volumes and settings."""

from __future__ import annotations

import copy
import math
import subprocess
from typing import Any

import pytest

import server.service as service
from server import bounds
from server.settings import ServerSettings, SettingsError, load_settings
from tests.kubernetes.chart import Document, of_kind, pod_templates, render, server
from tests.kubernetes.value_sets import (
    ALL_ON,
    DRA,
    KEYS,
    NAMED_NPU,
    PLUGIN,
    STATEFUL,
    VALUE_SETS,
)

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
# Of the restricted Pod Security Standard, and image volumes.
_VOLUMES = {"emptyDir", "persistentVolumeClaim", "secret", "image"}


def containers(pod: Document) -> list[Document]:
    """All containers of a pod, those that run first included."""
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize(
    ("propagation", "drain", "stop"), [(10, 25, 15), (0, 0, 12), (5, 600, 30), (7, 1, 13)]
)
def test_the_grace_period_is_what_an_end_may_take(propagation: int, drain: int, stop: int) -> None:
    given = server(
        {
            "shutdown": {
                "propagationSeconds": propagation,
                "drainTimeoutSeconds": drain,
                "stopSeconds": stop,
            }
        }
    )
    assert given.env["RBLN_SERVE_DRAIN_TIMEOUT_S"] == str(drain)
    slept = given.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
    assert slept.get("seconds", 0) == propagation
    grace_s = given.pod["terminationGracePeriodSeconds"]
    assert grace_s == propagation + drain + stop
    # After the drain: the engine's stop, and the last of uvicorn.
    assert grace_s > propagation + drain + service._ENGINE_STOP_S + 1


def test_the_drain_of_the_chart_is_the_servers() -> None:
    default = ServerSettings.model_fields["drain_timeout_s"].default
    assert float(server().env["RBLN_SERVE_DRAIN_TIMEOUT_S"]) == default


@pytest.mark.parametrize(("budget", "period"), [(1800, 5), (1, 1), (7215, 30), (100, 7), (3, 10)])
def test_a_probe_never_gives_up_before_its_budget(budget: int, period: int) -> None:
    values = {
        "probes": {
            "startup": {"budgetSeconds": budget, "periodSeconds": period},
            "liveness": {"hungAfterSeconds": max(10, budget), "periodSeconds": period},
        }
    }
    given = server(values)
    assert budget <= given.patience_s("startup") < budget + period
    assert max(10, budget) <= given.patience_s("liveness") < max(10, budget) + period
    paths = {p: given.container[f"{p}Probe"]["httpGet"]["path"] for p in PROBES}
    assert paths == PROBES


PROBES = {"startup": "/startupz", "readiness": "/readyz", "liveness": "/livez"}


def test_a_dying_server_ends_by_itself_before_liveness_acts() -> None:
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


def test_names_of_services_stay_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(t["spec"]["enableServiceLinks"] is False for t in pod_templates(render()).values())
    # Why: Kubernetes would set this for a Service called rbln-serve.
    monkeypatch.setenv("RBLN_SERVE_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(SettingsError, match="RBLN_SERVE_SERVICE_HOST"):
        load_settings({}, {})


def test_the_server_takes_the_rendered_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    values = copy.deepcopy(ALL_ON)
    values["settings"] |= {"max_body_bytes": 4194304, "max_queue_s": 0, "unknown_fields": "warn"}
    for name, value in server(values).env.items():
        monkeypatch.setenv(name, value)
    settings = load_settings({}, {})
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


def test_another_image_makes_another_job() -> None:
    def name(**image: str) -> str:
        return str(of_kind(render({**NAMED_NPU, "image": image}), "Job")["metadata"]["name"])

    assert name(tag="1") == name(tag="1") != name(tag="2")


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
    wanted: dict[str, Any] = of_kind(documents, "PodDisruptionBudget")["spec"]["selector"]
    assert wanted == of_kind(documents, "ServiceMonitor")["spec"]["selector"]
    assert wanted == of_kind(documents, "Deployment")["spec"]["selector"]
    labels = {name: template["metadata"]["labels"] for name, template in templates.items()}
    assert wanted["matchLabels"].items() <= labels["Deployment"].items()
    assert not wanted["matchLabels"].items() <= labels["Job"].items()


def test_a_budget_needs_more_than_one_replica() -> None:
    assert all(doc["kind"] != "PodDisruptionBudget" for doc in render())
    assert of_kind(render({"workload": {"replicas": 2}}), "PodDisruptionBudget")
    assert math.isclose(1, of_kind(render(ALL_ON), "PodDisruptionBudget")["spec"]["maxUnavailable"])
