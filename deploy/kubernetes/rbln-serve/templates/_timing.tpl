{{/* Times derived from values, in whole seconds. tests/kubernetes compares them with a real process. */}}

{{/* From the decision to end a pod to its last second. */}}
{{- define "rbln-serve.gracePeriod" -}}
{{- add (int .Values.shutdown.propagationSeconds) (int .Values.shutdown.drainTimeoutSeconds) (int .Values.shutdown.stopSeconds) -}}
{{- end -}}

{{/* Failures of a probe of `period` seconds within `budget` seconds, rounded up. */}}
{{- define "rbln-serve.failures" -}}
{{- div (sub (add (int .budget) (int .period)) 1) (int .period) | max 1 -}}
{{- end -}}

{{/* Time for a cold start with all compilations: of NPUs, as much as other charts for them give. */}}
{{- define "rbln-serve.startSeconds" -}}
{{- default (ternary 1800 7200 (eq .Values.device.kind "emulated")) (int .Values.probes.startup.budgetSeconds) -}}
{{- end -}}

{{- define "rbln-serve.prebuildSeconds" -}}
{{- default (include "rbln-serve.startSeconds" . | int) (int .Values.cache.prebuild.waitSeconds) -}}
{{- end -}}

{{/* Time limit of the init containers. */}}
{{- define "rbln-serve.initSeconds" -}}
{{- $cache := .Values.cache -}}
{{- $download := ternary (int .Values.model.download.seconds) 0 (ne .Values.model.download.repository "") -}}
{{- $import := ternary (int $cache.import.seconds) 0 $cache.import.enabled -}}
{{- add $download $import (ternary (include "rbln-serve.prebuildSeconds" . | int) 0 $cache.prebuild.enabled) -}}
{{- end -}}

{{/* A rollout without progress for longer than a pod's maximum start has failed. */}}
{{- define "rbln-serve.progressDeadline" -}}
{{- add (int .Values.workload.pullSeconds) (include "rbln-serve.initSeconds" . | int) (include "rbln-serve.startSeconds" . | int) (int .Values.workload.minReadySeconds) -}}
{{- end -}}

{{- define "rbln-serve.probes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne .Values.tls.secretName "") -}}
{{- with .Values.probes.startup }}
startupProbe:
  httpGet: {path: /startupz, port: http, scheme: {{ $scheme }}}
  periodSeconds: {{ .periodSeconds }}
  timeoutSeconds: {{ .timeoutSeconds }}
  failureThreshold: {{ include "rbln-serve.failures" (dict "budget" (include "rbln-serve.startSeconds" $) "period" .periodSeconds) }}
{{- end }}
{{- with .Values.probes.readiness }}
readinessProbe:
  httpGet: {path: /readyz, port: http, scheme: {{ $scheme }}}
  periodSeconds: {{ .periodSeconds }}
  timeoutSeconds: {{ .timeoutSeconds }}
  failureThreshold: {{ .failureThreshold }}
{{- end }}
{{- with .Values.probes.liveness }}
livenessProbe:
  httpGet: {path: /livez, port: http, scheme: {{ $scheme }}}
  periodSeconds: {{ .periodSeconds }}
  timeoutSeconds: {{ .timeoutSeconds }}
  failureThreshold: {{ include "rbln-serve.failures" (dict "budget" .hungAfterSeconds "period" .periodSeconds) }}
{{- end }}
{{- end -}}

{{- define "rbln-serve.lifecycle" -}}
{{- if gt (int .Values.shutdown.propagationSeconds) 0 -}}
lifecycle:
  preStop:
    sleep: {seconds: {{ .Values.shutdown.propagationSeconds }}}
{{- end -}}
{{- end -}}
