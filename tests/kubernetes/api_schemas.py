"""Offline schemas of what the chart renders.

Those of Kubernetes come with `kubernetes-validate` (made from the API's own description, closed
to unknown fields). Those of operators are below: the fields that the chart may set, by the CRDs of
prometheus-operator 0.8x, KEDA 2.1x, Gateway API 1, its inference extension 1 and
LeaderWorkerSet 0.7.
"""

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from deploy.kubernetes.schema import (
    FLAG,
    LABELS,
    PORT,
    TEXT,
    Schema,
    closed,
    many,
    one_of,
    required,
    whole,
)

NEWEST = "1.37"
_METADATA = closed(name=TEXT, namespace=TEXT, labels=LABELS, annotations=LABELS)
_SELECTOR = closed(matchLabels=LABELS)
_PARENT = closed(group=TEXT, kind=TEXT, namespace=TEXT, name=TEXT, sectionName=TEXT, port=PORT)
_BACKEND = closed(group=TEXT, kind=TEXT, name=TEXT, namespace=TEXT, port=PORT, weight=whole())
_POD_TEMPLATE: Schema = {"$ref": "podtemplatespec-v1.json"}


def _scrape() -> Schema:
    action = one_of("replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep", "hashmod")
    relabeling = closed(
        sourceLabels=many(TEXT), targetLabel=TEXT, replacement=TEXT, regex=TEXT, action=action
    )
    credentials = required(closed(name=TEXT, key=TEXT, optional=FLAG), "key")
    return required(
        closed(
            port=TEXT,
            path=TEXT,
            interval=TEXT,
            scrapeTimeout=TEXT,
            scheme=one_of("http", "https"),
            tlsConfig=closed(insecureSkipVerify=FLAG),
            authorization=closed(type=TEXT, credentials=credentials),
            relabelings=many(relabeling),
        ),
        "port",
    )


def _rule() -> Schema:
    rule = closed(record=TEXT, alert=TEXT, expr=TEXT, labels=LABELS, annotations=LABELS)
    rule["properties"]["for"] = {"type": "string", "pattern": "^[0-9]+(s|m|h|d)$"}
    return {**required(rule, "expr"), "oneOf": [{"required": ["record"]}, {"required": ["alert"]}]}


def _monitoring() -> dict[tuple[str, str], Schema]:
    return {
        ("monitoring.coreos.com/v1", "ServiceMonitor"): required(
            closed(selector=_SELECTOR, endpoints=many(_scrape())), "selector", "endpoints"
        ),
        ("monitoring.coreos.com/v1", "PodMonitor"): required(
            closed(selector=_SELECTOR, podMetricsEndpoints=many(_scrape())), "selector"
        ),
        ("monitoring.coreos.com/v1", "PrometheusRule"): closed(
            groups=many(required(closed(name=TEXT, interval=TEXT, rules=many(_rule())), "name"))
        ),
    }


def _scaling() -> dict[tuple[str, str], Schema]:
    behavior: Schema = {"$ref": "horizontalpodautoscalerbehavior-autoscaling-v2.json"}
    trigger = required(
        closed(
            type=one_of("prometheus"),
            metricType=one_of("AverageValue", "Value", "Utilization"),
            metadata=required(
                closed(serverAddress=TEXT, query=TEXT, threshold=TEXT),
                *"serverAddress query threshold".split(),
            ),
            authenticationRef=closed(name=TEXT, kind=TEXT),
        ),
        "type",
        "metadata",
    )
    target = required(closed(apiVersion=TEXT, kind=TEXT, name=TEXT), "name")
    return {
        ("keda.sh/v1alpha1", "ScaledObject"): required(
            closed(
                scaleTargetRef=target,
                minReplicaCount=whole(),
                maxReplicaCount=whole(1),
                pollingInterval=whole(1),
                fallback=closed(failureThreshold=whole(), replicas=whole()),
                advanced=closed(horizontalPodAutoscalerConfig=closed(behavior=behavior)),
                triggers=many(trigger),
            ),
            "scaleTargetRef",
            "triggers",
        )
    }


def _routing() -> dict[tuple[str, str], Schema]:
    picker = closed(
        group=TEXT,
        kind=TEXT,
        name=TEXT,
        port=required(closed(number=PORT), "number"),
        failureMode=one_of("FailOpen", "FailClose"),
    )
    path_match = closed(type=one_of("PathPrefix", "Exact"), value=TEXT)
    return {
        ("inference.networking.k8s.io/v1", "InferencePool"): required(
            closed(
                selector=required(_SELECTOR, "matchLabels"),
                targetPorts={**many(closed(number=PORT)), "minItems": 1, "maxItems": 8},
                endpointPickerRef=required(picker, "name"),
            ),
            *"selector targetPorts endpointPickerRef".split(),
        ),
        ("gateway.networking.k8s.io/v1", "HTTPRoute"): closed(
            parentRefs=many(required(_PARENT, "name")),
            hostnames=many(TEXT),
            rules=many(
                closed(
                    matches=many(closed(path=path_match)),
                    timeouts=closed(request=TEXT, backendRequest=TEXT),
                    backendRefs=many(required(_BACKEND, "name")),
                )
            ),
        ),
    }


def _groups() -> dict[tuple[str, str], Schema]:
    group = closed(
        size=whole(1),
        leaderTemplate=_POD_TEMPLATE,
        workerTemplate=_POD_TEMPLATE,
        restartPolicy=one_of("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
    )
    rollout = closed(
        type=one_of("RollingUpdate"),
        rollingUpdateConfiguration=closed(
            partition=whole(), maxSurge=whole(), maxUnavailable=whole()
        ),
    )
    return {
        ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): required(
            closed(
                replicas=whole(),
                leaderWorkerTemplate=required(group, "workerTemplate"),
                rolloutStrategy=rollout,
                startupPolicy=one_of("LeaderCreated", "LeaderReady"),
            ),
            "leaderWorkerTemplate",
        )
    }


_SPECS = {**_monitoring(), **_scaling(), **_routing(), **_groups()}


def _folder(version: str) -> Path:
    found = importlib.util.find_spec("kubernetes_validate")
    if found is None or not found.submodule_search_locations:
        pytest.skip("kubernetes-validate is not installed: run `make dev`")
    root = Path(found.submodule_search_locations[0]) / "kubernetes-json-schema"
    return root / f"v{version}.0-local-strict"


@cache
def _registry(version: str) -> Registry[Any]:
    @cache
    def read(name: str) -> Resource[Any]:
        # Between themselves they say /api/_definitions.json#/$defs/...
        path = _folder(version) / Path(name).name
        return Resource(json.loads(path.read_text(encoding="utf-8")), DRAFT202012)

    registry: Registry[Any] = Registry(retrieve=read)
    return registry


def _schema(document: dict[str, Any]) -> Schema:
    api, kind = document["apiVersion"], document["kind"]
    spec = _SPECS.get((api, kind))
    if spec is None:
        group, _, api_version = api.rpartition("/")
        place = "-".join([kind.lower(), *filter(None, [group.split(".")[0], api_version])])
        return {"$ref": f"{place}.json"}
    whole_document = closed(apiVersion=TEXT, kind=TEXT, metadata=_METADATA, spec=spec)
    return required(whole_document, "metadata", "spec")


def problems(document: dict[str, Any], version: str) -> list[str]:
    """What Kubernetes `version`, or the operator, would refuse in a document."""
    validator = jsonschema.Draft202012Validator(_schema(document), registry=_registry(version))
    where = f"{document['kind']}/{document['metadata']['name']}"
    return [
        f"{where} {error.json_path}: {error.message[:300]}"
        for error in validator.iter_errors(document)
    ]
