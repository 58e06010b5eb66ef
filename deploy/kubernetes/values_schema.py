"""The schema of the chart's values, as strict as possible without a cluster."""

from __future__ import annotations

from deploy.kubernetes.schema import (
    ABSOLUTE,
    DIGEST,
    FLAG,
    FREE,
    FREE_LIST,
    LABELS,
    NAME,
    PORT,
    QUANTITY,
    TEXT,
    Schema,
    closed,
    many,
    one_of,
    read_only_volume,
    required,
    whole,
)
from server.settings import ServerSettings

# Settings that follow from other values of the chart.
OWNED = tuple(
    "port drain_timeout_s data_dir lora_root run_root api_key api_key_file admin_key "
    "admin_key_file ssl_keyfile ssl_certfile ssl_keyfile_password ssl_ca_certs ssl_cert_reqs "
    "ssl_ciphers enable_ssl_refresh".split()
)
_KINDS = ("Deployment", "StatefulSet", "LeaderWorkerSet")
_PULL = one_of("Always", "IfNotPresent", "Never")
_SECRET = closed(secretName=NAME, key=TEXT)
_RESOURCES = closed(
    requests={"type": "object", "additionalProperties": {"type": ["string", "integer"]}},
    limits={"type": "object", "additionalProperties": {"type": ["string", "integer"]}},
)
_EXTRAS = tuple(
    "extraEnv extraEnvFrom extraPorts extraVolumes extraVolumeMounts extraInitContainers "
    "extraContainers".split()
)
# Variables of the server are `settings`; the others belong to the chart.
_ENV: Schema = {
    "type": "object",
    "propertyNames": {
        "pattern": "^[A-Z_][A-Z0-9_]*$",
        "not": {"pattern": "^(RBLN_SERVE_.*|VLLM_API_KEY|VLLM_CACHE_ROOT|VLLM_RBLN_DEVICE)$"},
    },
    "additionalProperties": TEXT,
}


def values_schema() -> Schema:
    """Return the whole schema in draft 7, which every Helm since version 3 supports."""
    properties = {**_workload(), **_lifecycle(), **_placement(), **_access(), "global": FREE}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **closed(**properties)}


def _settings() -> Schema:
    """Return the schema of `settings`, from the server's declaration."""
    declared = ServerSettings.model_json_schema()["properties"]
    for schema in declared.values():
        schema["description"] = " ".join(schema["description"].split())
    return closed(
        **{
            name: {k: v for k, v in schema.items() if k not in ("title", "default")}
            for name, schema in declared.items()
            if name not in OWNED
        }
    )


def _workload() -> dict[str, Schema]:
    """Return the values of image, model and engine."""
    return {
        "nameOverride": NAME,
        "fullnameOverride": NAME,
        "commonLabels": LABELS,
        "image": closed(
            repository={"type": "string", "minLength": 1},
            tag=TEXT,
            digest=DIGEST,
            pullPolicy=_PULL,
            pullSecrets=many(NAME),
        ),
        "workload": closed(
            kind=one_of(*_KINDS),
            replicas=whole(),
            maxSurge=whole(),
            maxUnavailable=whole(),
            minReadySeconds=whole(),
            revisionHistoryLimit=whole(),
            pullSeconds=whole(1),
        ),
        "model": closed(
            path={"type": "string", "minLength": 1},
            servedNames=many({"type": "string", "minLength": 1}),
            volume=read_only_volume(),
            subPath=TEXT,
            download=closed(
                repository={"type": "string", "pattern": "^([^/ ]+/[^/ ]+)?$"},
                revision=TEXT,
                endpoint={"type": "string", "pattern": "^(https?://.+)?$"},
                tokenSecret=closed(name=NAME, key=TEXT),
                claimName=NAME,
                size=QUANTITY,
                seconds=whole(1),
            ),
        ),
        "engine": closed(args=many(TEXT), env=_ENV),
        "settings": _settings(),
        "adapters": closed(
            enabled=FLAG,
            volume=read_only_volume(),
            subPath=TEXT,
            readOnly=FLAG,
            modules={"type": "object", "additionalProperties": ABSOLUTE},
        ),
        "prefillDecode": closed(
            role=one_of("both", "prefill", "decode"),
            sideChannelPort=PORT,
        ),
        "headless": closed(enginesPerPod=whole(), rpcPort=PORT),
        "ray": closed(workers=whole(1), workerResources=_RESOURCES),
    }


def _lifecycle() -> dict[str, Schema]:
    """Return the values of start, shutdown, cache and secrets."""
    return {
        "shutdown": closed(
            propagationSeconds=whole(), drainTimeoutSeconds=whole(), stopSeconds=whole(12)
        ),
        "probes": closed(
            startup=closed(budgetSeconds=whole(), periodSeconds=whole(1), timeoutSeconds=whole(1)),
            readiness=closed(
                periodSeconds=whole(1), timeoutSeconds=whole(1), failureThreshold=whole(1)
            ),
            liveness=closed(
                hungAfterSeconds=whole(10), periodSeconds=whole(1), timeoutSeconds=whole(1)
            ),
        ),
        "data": closed(enabled=FLAG, storageClassName=NAME, size=QUANTITY),
        "cache": closed(
            persistence=closed(
                enabled=FLAG,
                existingClaim=NAME,
                storageClassName=NAME,
                accessModes=many(one_of("ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod")),
                size=QUANTITY,
                keep=FLAG,
            ),
            emptyDirSize=QUANTITY,
            readOnly=FLAG,
            **{
                "import": closed(
                    enabled=FLAG,
                    file={"type": "string", "pattern": "^([^/].*)?$"},
                    digest=DIGEST,
                    volume=read_only_volume(),
                    seconds=whole(1),
                )
            },
            prebuild=closed(
                enabled=FLAG,
                npuName={"type": "string", "pattern": "^(RBLN-.+)?$"},
                waitSeconds=whole(),
                backoffLimit=whole(),
            ),
        ),
        "auth": closed(apiKeys=_SECRET, adminKeys=_SECRET),
        "tls": closed(secretName=NAME),
    }


def _placement() -> dict[str, Schema]:
    """Return the values of devices, resources and scheduling."""
    return {
        "device": closed(
            kind=one_of("emulated", "plugin", "dra"),
            count=whole(1),
            resource={"type": "string", "pattern": "^rebellions\\.ai/[A-Za-z0-9_]+$"},
            deviceClassName=NAME,
            selectors=many(TEXT),
            matchAttribute={"type": "string", "pattern": "^([a-z0-9.-]+/[A-Za-z0-9_]+)?$"},
            claimTemplate=NAME,
            nodeLabels=FLAG,
            family=one_of("", "ATOM", "REBEL"),
            products=many({"type": "string", "pattern": "^RBLN-"}),
        ),
        "resources": _RESOURCES,
        "memory": closed(base=QUANTITY, perDevice=QUANTITY, model=QUANTITY),
        "shmSize": QUANTITY,
        "tmpSize": QUANTITY,
        **dict.fromkeys(_EXTRAS, FREE_LIST),
        "podAnnotations": LABELS,
        "podLabels": LABELS,
        "podSecurityContext": FREE,
        "serviceAccount": closed(create=FLAG, name=NAME, annotations=LABELS),
        "nodeSelector": LABELS,
        "affinity": closed(nodeAffinity=FREE, podAffinity=FREE, podAntiAffinity=FREE),
        "tolerations": FREE_LIST,
        "topologySpread": closed(
            enabled=FLAG,
            topologyKey=TEXT,
            maxSkew=whole(1),
            whenUnsatisfiable=one_of("ScheduleAnyway", "DoNotSchedule"),
        ),
        "priorityClassName": NAME,
        "runtimeClassName": NAME,
        "podDisruptionBudget": closed(
            enabled=FLAG,
            maxUnavailable={
                "anyOf": [whole(1), {"type": "string", "pattern": "^([1-9][0-9]?|100)%$"}]
            },
        ),
        "autoscaling": _autoscaling(),
    }


def _autoscaling() -> Schema:
    """Return the values of scaling."""
    return closed(
        kind=one_of("none", "hpa", "keda"),
        minReplicas=whole(1),
        maxReplicas=whole(1),
        targetWaiting=whole(1),
        targetInFlight=whole(1),
        scaleDownStabilizationSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
        hpa=closed(waitingMetric=TEXT, inFlightMetric=TEXT),
        keda=closed(
            prometheusAddress={"type": "string", "pattern": "^(https?://.+)?$"},
            pollingInterval=whole(1),
            authenticationRef=NAME,
            fallbackReplicas=whole(),
        ),
    )


def _access() -> dict[str, Schema]:
    """Return the values of networking and monitoring."""
    duration: Schema = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}
    monitor = closed(enabled=FLAG, labels=LABELS, interval=duration, scrapeTimeout=duration)
    parent = closed(group=TEXT, kind=TEXT, namespace=NAME, name=NAME, sectionName=TEXT, port=PORT)
    return {
        "service": closed(
            type=one_of("ClusterIP", "NodePort", "LoadBalancer"), port=PORT, annotations=LABELS
        ),
        "exposedPaths": many(ABSOLUTE),
        "ingress": closed(
            enabled=FLAG,
            className=NAME,
            annotations=LABELS,
            hosts=many({"type": "string", "minLength": 1}),
            tlsSecretName=NAME,
        ),
        "gateway": closed(
            httpRoute=closed(
                enabled=FLAG,
                parentRefs=many(required(parent, "name")),
                hostnames=many(TEXT),
                requestTimeout=duration,
                backend=one_of("Service", "InferencePool"),
            ),
            inferencePool=closed(
                enabled=FLAG,
                name=NAME,
                endpointPicker=closed(
                    name=NAME, port=PORT, failureMode=one_of("FailOpen", "FailClose")
                ),
            ),
        ),
        "networkPolicy": closed(**{"enabled": FLAG, "from": FREE_LIST, "egress": FREE_LIST}),
        "metrics": closed(
            bearerSecret=closed(name=NAME, key=TEXT),
            serviceMonitor=monitor,
            podMonitor=monitor,
            rules=closed(
                enabled=FLAG, extended=FLAG, devices=FLAG, labels=LABELS, runbookBaseUrl=TEXT
            ),
            dashboards=closed(
                enabled=FLAG, scope=one_of("release", "all"), labels=LABELS, annotations=LABELS
            ),
        ),
    }
