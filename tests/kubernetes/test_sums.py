"""Memory, threads, image and start-up times of the chart follow the device and its count."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kubernetes.chart import Document, of_kind, render, server
from tests.kubernetes.value_sets import NAMED_NPU, PLUGIN

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
            *("9Gi", "3Gi"),
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
    assert _volume_of(builder, "cache").get("readOnly") is None
    # Each replica of a StatefulSet fills its own claim.
    stateful = {**PLUGIN, "workload": {"kind": "StatefulSet"}}
    assert server(stateful).pod["initContainers"][0]["name"] == "build-cache"
    assert of_kind(render(NAMED_NPU), "Job")


def _volume_of(container: Document, name: str) -> Document:
    (found,) = [mount for mount in container["volumeMounts"] if mount["name"] == name]
    return found
