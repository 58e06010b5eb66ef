{{/* Init containers that fill the cache before the server starts, and the job's command. */}}

{{- define "rbln-serve.initContainers" -}}
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
{{- if .Values.cache.prebuild.enabled }}
- name: wait-for-cache
  {{- include "rbln-serve.cacheContainer" . | nindent 2 }}
  # `cache inspect` exits with 0 if the cache is complete, and with 3 if not.
  command:
    - /bin/sh
    - -c
    - |
      end=$(( $(date +%s) + {{ int .Values.cache.prebuild.waitSeconds }} ))
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
{{ include "rbln-serve.resources" (dict "root" . "resources" .Values.resources) }}
{{- end -}}
