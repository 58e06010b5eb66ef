{{/* Refusals of combinations that a schema cannot express, with the fix. */}}
{{- define "rbln-serve.checks" -}}
{{- $v := .Values -}}
{{- if and $v.metrics.serviceMonitor.enabled $v.metrics.podMonitor.enabled -}}
{{- fail "metrics.serviceMonitor and metrics.podMonitor would both scrape each pod: enable one" -}}
{{- end -}}
{{- $scraped := or $v.metrics.serviceMonitor.enabled $v.metrics.podMonitor.enabled -}}
{{- if and $scraped $v.auth.apiKeys.secretName (not $v.metrics.bearerSecret.name) (not $v.settings.open_metrics) -}}
{{- fail "auth.apiKeys closes /metrics: set metrics.bearerSecret.name, or settings.open_metrics to true" -}}
{{- end -}}
{{- if and (eq $v.workload.kind "LeaderWorkerSet") (ne $v.autoscaling.kind "none") -}}
{{- fail "autoscaling.kind: replicas of a LeaderWorkerSet are groups of pods; use none and workload.replicas" -}}
{{- end -}}
{{- if and (include "rbln-serve.hasRole" .) (eq $v.workload.kind "LeaderWorkerSet") -}}
{{- fail (printf "prefillDecode.role %s needs workload.kind Deployment or StatefulSet: NixlConnector sends KV of ranks in one pod" $v.prefillDecode.role) -}}
{{- end -}}
{{- if and (gt (int $v.headless.enginesPerPod) 0) (ne $v.workload.kind "LeaderWorkerSet") -}}
{{- fail "headless.enginesPerPod needs workload.kind LeaderWorkerSet; elsewhere set --data-parallel-size in engine.args" -}}
{{- end -}}
{{- if and (eq $v.autoscaling.kind "keda") (not $v.autoscaling.keda.prometheusAddress) -}}
{{- fail "autoscaling.keda.prometheusAddress is needed with autoscaling.kind keda" -}}
{{- end -}}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas %d is more than autoscaling.maxReplicas %d" (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if and $v.data.enabled (or (ne $v.workload.kind "StatefulSet") (ne (int $v.workload.replicas) 1) (ne $v.autoscaling.kind "none")) -}}
{{- fail "data.enabled needs workload.kind StatefulSet, workload.replicas 1 and autoscaling.kind none: a store belongs to one server" -}}
{{- end -}}
{{- if and $v.cache.import.enabled (or (not $v.cache.import.file) (not $v.cache.import.volume)) -}}
{{- fail "cache.import needs file, the bundle's path, and volume, which contains it" -}}
{{- end -}}
{{- if and $v.cache.prebuild.enabled (not $v.cache.persistence.enabled) -}}
{{- fail "cache.prebuild fills a volume that pods share: set cache.persistence.enabled" -}}
{{- end -}}
{{- if and $v.cache.prebuild.enabled (include "rbln-serve.usesRay" .) -}}
{{- fail "cache.prebuild: ranks of several pods compile with Ray, which runs after the init containers; use cache.import" -}}
{{- end -}}
{{- if and (include "rbln-serve.prebuildJob" .) (eq $v.workload.kind "StatefulSet") (not $v.cache.persistence.existingClaim) -}}
{{- fail "cache.prebuild cannot fill the claims of a StatefulSet: set cache.persistence.existingClaim, or use cache.import" -}}
{{- end -}}
{{- if and $v.cache.prebuild.npuName (eq $v.device.kind "emulated") -}}
{{- fail "cache.prebuild.npuName has no effect with device.kind emulated" -}}
{{- end -}}
{{- if and $v.model.download.repository $v.model.volume -}}
{{- fail "model.download and model.volume would both be mounted at /models: set one" -}}
{{- end -}}
{{- if and $v.model.download.repository $v.networkPolicy.enabled (not $v.networkPolicy.egress) -}}
{{- fail "model.download needs a rule in networkPolicy.egress, such as {ports: [{port: 443, protocol: TCP}, {port: 53, protocol: UDP}]}: pods have no network without one" -}}
{{- end -}}
{{- if and (not $v.model.download.repository) (or $v.model.download.revision $v.model.download.claimName $v.model.download.endpoint $v.model.download.tokenSecret.name) -}}
{{- fail "model.download has no effect without model.download.repository" -}}
{{- end -}}
{{- $memory := dig "limits" "memory" "" $v.resources -}}
{{- $least := add (include "rbln-serve.mebibytes" $v.shmSize | int64) (include "rbln-serve.mebibytes" $v.memory.base | int64) -}}
{{- if and $memory (lt (include "rbln-serve.mebibytes" $memory | int64) $least) -}}
{{- fail (printf "resources.limits.memory %s is less than memory.base %s and shmSize %s, which counts against it" $memory $v.memory.base $v.shmSize) -}}
{{- end -}}
{{- if and (eq $v.workload.kind "Deployment") (eq (int $v.workload.maxSurge) 0) (eq (int $v.workload.maxUnavailable) 0) -}}
{{- fail "workload.maxSurge and workload.maxUnavailable are both 0: a rollout could not begin" -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.hosts) -}}
{{- fail "ingress.hosts is empty" -}}
{{- end -}}
{{- if and $v.gateway.httpRoute.enabled (not $v.gateway.httpRoute.parentRefs) -}}
{{- fail "gateway.httpRoute.parentRefs is empty: name the Gateway" -}}
{{- end -}}
{{- if and $v.gateway.inferencePool.enabled (not $v.gateway.inferencePool.endpointPicker.name) -}}
{{- fail "gateway.inferencePool.endpointPicker.name is empty: the Service of the endpoint picker" -}}
{{- end -}}
{{- if and (eq $v.gateway.httpRoute.backend "InferencePool") (not $v.gateway.inferencePool.enabled) (not $v.gateway.inferencePool.name) -}}
{{- fail "gateway.httpRoute.backend InferencePool: enable gateway.inferencePool or name one that exists" -}}
{{- end -}}
{{- if and $v.adapters.modules (not $v.adapters.enabled) -}}
{{- fail "adapters.modules has no effect without adapters.enabled" -}}
{{- end -}}
{{- end -}}
