{{/* Times that follow from values, in whole seconds. tests/kubernetes holds them against a real process. */}}

{{/* From the pod's end being decided to its last second. */}}
{{- define "rbln-serve.gracePeriod" -}}
{{- add (int .Values.shutdown.propagationSeconds) (int .Values.shutdown.drainTimeoutSeconds) (int .Values.shutdown.stopSeconds) -}}
{{- end -}}

{{/* How often a probe of `period` seconds may fail within `budget` seconds; rounded up. */}}
{{- define "rbln-serve.failures" -}}
{{- div (sub (add (int .budget) (int .period)) 1) (int .period) | max 1 -}}
{{- end -}}

{{/* What init containers may take. */}}
{{- define "rbln-serve.initSeconds" -}}
{{- $cache := .Values.cache -}}
{{- add (ternary (int $cache.import.seconds) 0 $cache.import.enabled) (ternary (int $cache.prebuild.waitSeconds) 0 $cache.prebuild.enabled) -}}
{{- end -}}

{{/* A roll that makes no progress for longer than any pod may take to become ready has failed. */}}
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
