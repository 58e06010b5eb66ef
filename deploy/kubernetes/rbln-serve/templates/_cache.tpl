{{/* Init containers that fill the cache before the server starts, and the job's command. */}}

{{- define "rbln-serve.initContainers" -}}
{{- include "rbln-serve.download" . }}
{{- if .Values.cache.import.enabled }}
- name: import-cache
  {{- include "rbln-serve.cacheContainer" . | nindent 2 }}
  {{- include "rbln-serve.command" . | nindent 2 }}
  args:
    - cache
    - import
    - {{ printf "/bundle/%s" .Values.cache.import.file | quote }}
    {{- with .Values.cache.import.digest }}
    - --digest
    - {{ . | quote }}
    {{- end }}
  volumeMounts:
    {{- include "rbln-serve.commonMounts" . | nindent 4 }}
    - {name: cache, mountPath: /cache}
    - {name: bundle, mountPath: /bundle, readOnly: true}
{{- end }}
{{- if and .Values.cache.prebuild.enabled (not (include "rbln-serve.prebuildJob" .)) }}
- name: build-cache
  {{- include "rbln-serve.cacheContainer" . | nindent 2 }}
  # Pods build at the same time: the store locks each graph, so one compiles it and the others wait.
  command:
    - /bin/sh
    - -c
    - |
      umask 0002
      rbln-serve cache inspect --model "$@" && exit 0
      code=$?
      [ "$code" -eq 3 ] || exit "$code"
      timeout {{ include "rbln-serve.prebuildSeconds" . }} rbln-serve compile "$@" && exit 0
      code=$?
      [ "$code" -eq 124 ] || exit "$code"
      echo "compiled long enough: the server compiles what is missing"
    - build-cache
  args:
    {{- include "rbln-serve.modelArgs" . | nindent 4 }}
  volumeMounts:
    {{- include "rbln-serve.commonMounts" . | nindent 4 }}
    - {name: cache, mountPath: /cache}
{{- end }}
{{- if include "rbln-serve.prebuildJob" . }}
- name: wait-for-cache
  {{- include "rbln-serve.cacheContainer" . | nindent 2 }}
  # `cache inspect` exits with 0 if the cache is complete, and with 3 if not.
  command:
    - /bin/sh
    - -c
    - |
      end=$(( $(date +%s) + {{ include "rbln-serve.prebuildSeconds" . }} ))
      while :; do
        rbln-serve cache inspect --model "$@" && exit 0
        code=$?
        [ "$code" -eq 3 ] || exit "$code"
        [ "$(date +%s)" -lt "$end" ] || { echo "waited long enough: the server compiles what is missing"; exit 0; }
        sleep 15
      done
    - wait-for-cache
  args:
    {{- include "rbln-serve.modelArgs" . | nindent 4 }}
  volumeMounts:
    {{- include "rbln-serve.commonMounts" . | nindent 4 }}
    - {name: cache, mountPath: /cache}
{{- end }}
{{- end -}}

{{/* "true" if a job fills the cache. One that needs NPUs would wait for those of the pods that wait
     for it, so that pods with NPUs compile themselves. */}}
{{- define "rbln-serve.prebuildJob" -}}
{{- $prebuild := .Values.cache.prebuild -}}
{{- if and $prebuild.enabled (or $prebuild.npuName (eq .Values.device.kind "emulated")) -}}true{{- end -}}
{{- end -}}

{{/* Downloads of several pods into one claim wait for each other: huggingface_hub locks files. */}}
{{- define "rbln-serve.download" -}}
{{- $download := .Values.model.download }}
{{- if $download.repository }}
{{- $env := list }}
{{- range include "rbln-serve.engineEnv" . | fromYamlArray }}
{{- if ne .name "HF_HUB_OFFLINE" }}{{ $env = append $env . }}{{ end }}
{{- end }}
{{- with $download.endpoint }}
{{- $env = append $env (dict "name" "HF_ENDPOINT" "value" .) }}
{{- end }}
{{- with $download.tokenSecret }}
{{- if .name }}
{{- $env = append $env (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" (dict "name" .name "key" .key))) }}
{{- end }}
{{- end }}
- name: download-model
  {{- $container := include "rbln-serve.cacheContainer" . | fromYaml }}
  {{- toYaml (set $container "env" $env) | nindent 2 }}
  {{- include "rbln-serve.command" . | nindent 2 }}
  args:
    - fetch
    - {{ $download.repository | quote }}
    {{- with $download.revision }}
    - --revision
    - {{ . | quote }}
    {{- end }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: models, mountPath: /models}
    - {name: cache, mountPath: /cache}
{{- end }}
{{- end -}}

{{/* A command that replaces the image's; its files are group-writable, like the server's. */}}
{{- define "rbln-serve.command" -}}
command: [/bin/sh, -c, 'umask 0002; exec rbln-serve "$@"', rbln-serve]
{{- end -}}

{{/* They get the server's device, because compiling queries it. */}}
{{- define "rbln-serve.cacheContainer" -}}
image: {{ include "rbln-serve.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{ include "rbln-serve.containerSecurity" . }}
env:
  {{- include "rbln-serve.engineEnv" . | nindent 2 }}
{{ include "rbln-serve.resources" (dict "root" . "resources" (include "rbln-serve.withMemory" . | fromYaml)) }}
{{- end -}}
