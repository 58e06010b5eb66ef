"""Sets of values that the chart is rendered with; docs/kubernetes.md shows some of them."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

KEYS: Values = {
    "auth": {
        "apiKeys": {"secretName": "keys", "key": "api"},
        "adminKeys": {"secretName": "keys", "key": "admin"},
    },
    "tls": {"secretName": "certificate"},
    "settings": {"max_body_bytes": 4194304, "open_metrics": True, "log_format": "json"},
}
PLUGIN: Values = {
    "workload": {"replicas": 3, "maxSurge": 0, "maxUnavailable": 1},
    "model": {
        "path": "/models/llama",
        "servedNames": ["llama", "llama-1b"],
        "volume": {"persistentVolumeClaim": {"claimName": "models"}},
    },
    "device": {
        "kind": "plugin",
        "resource": "rebellions.ai/ATOM",
        "count": 4,
        "family": "ATOM",
        "products": ["RBLN-CA25"],
    },
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
                    {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]},
                ]
            }
        }
    },
    "tolerations": [{"key": "rebellions.ai/npu", "operator": "Exists", "effect": "NoSchedule"}],
    "engine": {
        "args": ["--max-num-seqs", "16", "--additional-config", '{"rbln": {"profiler": false}}'],
        "env": {"VLLM_RBLN_COMPILE_STRICT_MODE": "1"},
    },
    "cache": {"persistence": {"enabled": True}, "prebuild": {"enabled": True}, "readOnly": True},
}
DRA: Values = {
    "device": {
        "kind": "dra",
        "count": 2,
        "nodeLabels": False,
        "matchAttribute": "npu.rebellions.ai/productName",
        "selectors": ["device.attributes['npu.rebellions.ai'].productName.startsWith('RBLN-CR')"],
    },
    "model": {
        "path": "/models",
        "volume": {"image": {"reference": "registry.example/llama:1", "pullPolicy": "Always"}},
    },
    "cache": {
        "import": {
            "enabled": True,
            "file": "cache.rblncache",
            "digest": "sha256:" + "0" * 64,
            "volume": {"image": {"reference": "registry.example/llama-cache:1"}},
        }
    },
}
STATEFUL: Values = {
    "workload": {"kind": "StatefulSet", "replicas": 2},
    "cache": {
        "persistence": {
            "enabled": True,
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "fast",
            "size": "5Gi",
        }
    },
    "adapters": {
        "enabled": True,
        "volume": {"persistentVolumeClaim": {"claimName": "adapters"}},
        "modules": {"formal": "/adapters/formal"},
    },
}
# The chart leaves what it did not make as it is; the restricted standard needs this.
_RESTRICTED: Values = {
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
}
EXTRAS: Values = {
    "engine": {"env": {"HF_HUB_OFFLINE": "0", "HOME": "/models"}},
    "extraEnv": [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    ],
    "extraEnvFrom": [{"configMapRef": {"name": "proxies"}}],
    "extraPorts": [{"name": "kv-events", "containerPort": 5557}],
    "extraVolumes": [{"name": "weights", "emptyDir": {}}, {"name": "kv", "emptyDir": {}}],
    "extraVolumeMounts": [
        {"name": "weights", "mountPath": "/weights", "readOnly": True},
        {"name": "kv", "mountPath": "/kv"},
    ],
    "extraInitContainers": [
        {
            "name": "download",
            "image": "rbln-serve",
            "args": ["fetch", "org/repo"],
            "volumeMounts": [{"name": "weights", "mountPath": "/weights"}],
            **_RESTRICTED,
        }
    ],
    "extraContainers": [
        {
            "name": "syncer",
            "image": "registry.example/syncer:1",
            "volumeMounts": [{"name": "kv", "mountPath": "/kv", "readOnly": True}],
            **_RESTRICTED,
        }
    ],
}
# The chart's own Job compiles for an NPU that its node need not have.
NAMED_NPU: Values = {
    **PLUGIN,
    "cache": {
        "persistence": {"enabled": True},
        "prebuild": {"enabled": True, "npuName": "RBLN-CA25"},
    },
}
DOWNLOAD: Values = {
    "model": {
        "servedNames": ["tiny"],
        "download": {
            "repository": "org/tiny",
            "revision": "main",
            "tokenSecret": {"name": "hub", "key": "token"},
            "size": "10Gi",
        },
    },
    "networkPolicy": {
        "egress": [{"ports": [{"port": 443, "protocol": "TCP"}, {"port": 53, "protocol": "UDP"}]}]
    },
    "cache": {"persistence": {"enabled": True}, "prebuild": {"enabled": True}},
}
KEDA: Values = {
    "autoscaling": {
        "kind": "keda",
        "minReplicas": 2,
        "maxReplicas": 8,
        "keda": {
            "prometheusAddress": "http://prometheus.monitoring:9090",
            "authenticationRef": "prometheus",
            "fallbackReplicas": 4,
        },
    },
}
HPA: Values = {"autoscaling": {"kind": "hpa", "maxReplicas": 6}}
GROUPS: Values = {
    "workload": {"kind": "LeaderWorkerSet", "replicas": 2, "maxSurge": 0, "maxUnavailable": 1},
    "ray": {"workers": 1},
    "engine": {"args": ["--tensor-parallel-size", "8"]},
    "device": {"kind": "plugin", "count": 4},
}
GATEWAY: Values = {
    "gateway": {
        "httpRoute": {
            "enabled": True,
            "parentRefs": [{"name": "inference-gateway", "namespace": "gateways"}],
            "hostnames": ["llm.example"],
            "backend": "InferencePool",
        },
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "llm-epp"}},
    },
}
ALL_ON: Values = {
    **KEYS,
    "commonLabels": {"team": "serving"},
    "image": {
        "repository": "registry.example/rbln-serve",
        "tag": "1",
        "pullSecrets": ["pull"],
        "digest": "sha256:" + "a" * 64,
    },
    "workload": {"replicas": 4, "minReadySeconds": 5},
    "settings": {"max_in_flight": 64, "max_n": 2, "lora_base_names": ["a", "b"]},
    "adapters": {
        "enabled": True,
        "readOnly": True,
        "volume": {"nfs": {"server": "n", "path": "/"}},
    },
    "cache": {
        "persistence": {"enabled": True, "existingClaim": "graphs"},
        "prebuild": {"enabled": True},
        "import": {
            "enabled": True,
            "file": "a/b.bundle",
            "volume": {"persistentVolumeClaim": {"claimName": "bundles"}},
        },
    },
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "hosts": ["a.example", "b.example"],
        "tlsSecretName": "edge",
        "annotations": {"nginx.ingress.kubernetes.io/x": "y"},
    },
    "gateway": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "edge"}]}},
    "networkPolicy": {
        "from": [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}],
        "egress": [{"ports": [{"port": 4317, "protocol": "TCP"}]}],
    },
    "metrics": {
        "bearerSecret": {"name": "scrape"},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "rules": {"enabled": True, "runbookBaseUrl": "https://git.example/"},
        "dashboards": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
    },
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
    "priorityClassName": "serving",
    "runtimeClassName": "rbln",
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
}
POD_MONITOR: Values = {"metrics": {"podMonitor": {"enabled": True}, "rules": {"enabled": True}}}

# Name -> values and the oldest Kubernetes whose schemas they are checked against.
DATA: Values = {
    "workload": {"kind": "StatefulSet", "replicas": 1},
    "data": {"enabled": True, "size": "5Gi", "storageClassName": "fast"},
}

VALUE_SETS: dict[str, tuple[Values, str]] = {
    "defaults": ({}, "1.30"),
    "keys-tls": (KEYS, "1.30"),
    "plugin": (PLUGIN, "1.30"),
    "named-npu": (NAMED_NPU, "1.30"),
    "download": (DOWNLOAD, "1.30"),
    "dra": (DRA, "1.34"),
    "stateful": (STATEFUL, "1.30"),
    "data": (DATA, "1.30"),
    "extras": (EXTRAS, "1.30"),
    "keda": (KEDA, "1.30"),
    "hpa": (HPA, "1.30"),
    "groups": (GROUPS, "1.30"),
    "gateway": (GATEWAY, "1.30"),
    "all-on": (ALL_ON, "1.30"),
    "pod-monitor": (POD_MONITOR, "1.30"),
}
