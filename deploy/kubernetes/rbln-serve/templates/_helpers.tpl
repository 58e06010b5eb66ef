{{/* Names, labels, image. */}}

{{- define "rbln-serve.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* 50 characters leave space for the suffixes of derived names. */}}
{{- define "rbln-serve.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "rbln-serve.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "rbln-serve.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "rbln-serve.selectorLabels" -}}
app.kubernetes.io/name: {{ include "rbln-serve.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Pods that serve, without jobs of the same release. */}}
{{- define "rbln-serve.serverLabels" -}}
{{ include "rbln-serve.selectorLabels" . }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "rbln-serve.labels" -}}
{{ include "rbln-serve.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "rbln-serve.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "rbln-serve.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* The image without the vendor's SDK has the plain version, the one with it `-npu`. */}}
{{- define "rbln-serve.image" -}}
{{- $tag := default (print .Chart.AppVersion (ternary "" "-npu" (eq .Values.device.kind "emulated"))) .Values.image.tag -}}
{{- if .Values.image.digest -}}
{{- printf "%s:%s@%s" .Values.image.repository $tag .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository $tag -}}
{{- end -}}
{{- end -}}

{{- define "rbln-serve.cacheClaim" -}}
{{- default (printf "%s-cache" (include "rbln-serve.fullname" .)) .Values.cache.persistence.existingClaim -}}
{{- end -}}

{{- define "rbln-serve.claimTemplate" -}}
{{- default (printf "%s-npu" (include "rbln-serve.fullname" .)) .Values.device.claimTemplate -}}
{{- end -}}

{{- define "rbln-serve.poolName" -}}
{{- default (include "rbln-serve.fullname" .) .Values.gateway.inferencePool.name -}}
{{- end -}}

{{/* "true" if ranks of one model run in several pods, placed by Ray. */}}
{{- define "rbln-serve.usesRay" -}}
{{- if and (eq .Values.workload.kind "LeaderWorkerSet") (not (include "rbln-serve.isHeadless" .)) -}}true{{- end -}}
{{- end -}}

{{/* "true" if the workers of a group are servers without an API, which run engines for the leader. */}}
{{- define "rbln-serve.isHeadless" -}}
{{- if and (eq .Values.workload.kind "LeaderWorkerSet") (gt (int .Values.headless.enginesPerPod) 0) -}}true{{- end -}}
{{- end -}}

{{/* "true" if prompts are read by one release and answered by another. */}}
{{- define "rbln-serve.hasRole" -}}
{{- if ne .Values.prefillDecode.role "both" -}}true{{- end -}}
{{- end -}}

{{/* "true" if more than one replica can run. */}}
{{- define "rbln-serve.scaled" -}}
{{- if or (ne .Values.autoscaling.kind "none") (gt (int .Values.workload.replicas) 1) -}}true{{- end -}}
{{- end -}}
