{{/* Times derived from values, in whole seconds. tests/kubernetes compares them with a real process. */}}

{{/* From the decision to end a pod to its last second. */}}
{{- define "rbln-serve.gracePeriod" -}}
{{- add (int .Values.shutdown.propagationSeconds) (int .Values.shutdown.drainTimeoutSeconds) (int .Values.shutdown.stopSeconds) -}}
{{- end -}}

{{/* Failures of a probe of `period` seconds within `budget` seconds, rounded up. */}}
{{- define "rbln-serve.failures" -}}
{{- div (sub (add (int .budget) (int .period)) 1) (int .period) | max 1 -}}
{{- end -}}

{{/* Time limit of the init containers. */}}
{{- define "rbln-serve.initSeconds" -}}
{{- $cache := .Values.cache -}}
{{- add (ternary (int $cache.import.seconds) 0 $cache.import.enabled) (ternary (int $cache.prebuild.waitSeconds) 0 $cache.prebuild.enabled) -}}
{{- end -}}

{{/* A rollout without progress for longer than a pod's maximum start has failed. */}}
{{- define "rbln-serve.progressDeadline" -}}
{{- add (int .Values.workload.pullSeconds) (include "rbln-serve.initSeconds" . | int) (int .Values.probes.startup.budgetSeconds) (int .Values.workload.minReadySeconds) -}}
{{- end -}}

{{- define "rbln-serve.probes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne .Values.tls.secretName "") -}}
{{- with .Values.probes.startup }}
startupProbe:
  httpGet: {path: /startupz, port: http, scheme: {{ $scheme }}}
  periodSeconds: {{ .periodSeconds }}
  timeoutSeconds: {{ .timeoutSeconds }}
  failureThreshold: {{ include "rbln-serve.failures" (dict "budget" .budgetSeconds "period" .periodSeconds) }}
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
