{{/* Command line and environment of the server. Settings are variables, so none appears as a flag. */}}

{{/* The model and the flags that change graphs: equal for serving, compiling and inspecting. */}}
{{- define "rbln-serve.modelArgs" -}}
- {{ default .Values.model.path .Values.model.download.repository | quote }}
{{- with .Values.model.download.revision }}
- --revision
- {{ . | quote }}
{{- end }}
{{- if .Values.model.servedNames }}
- --served-model-name
{{- range .Values.model.servedNames }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- if .Values.adapters.enabled }}
- --enable-lora
{{- if .Values.adapters.modules }}
- --lora-modules
{{- range $name, $path := .Values.adapters.modules }}
- {{ printf "%s=%s" $name $path | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- if include "rbln-serve.usesRay" . }}
- --distributed-executor-backend
- ray
{{- end }}
{{- if include "rbln-serve.hasRole" . }}
- --kv-transfer-config
- {{ dict "kv_connector" "NixlConnector" "kv_role" (ternary "kv_producer" "kv_consumer" (eq .Values.prefillDecode.role "prefill")) | toJson | quote }}
{{- end }}
{{- range .Values.engine.args }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Environment of every container that runs the image. */}}
{{- define "rbln-serve.engineEnv" -}}
- {name: VLLM_CACHE_ROOT, value: /cache}
- {name: VLLM_RBLN_DEVICE, value: {{ ternary "emulated" "rebel" (eq .Values.device.kind "emulated") }}}
{{- $ours := dict "HF_HUB_OFFLINE" "1" "HOME" "/tmp" }}
{{- if .Values.model.download.repository }}
{{- $_ := set $ours "HF_HUB_CACHE" "/models" }}
{{- end }}
{{- with include "rbln-serve.threads" . }}
{{- if not (hasKey $.Values.engine.env "OMP_NUM_THREADS") }}
{{- $_ := set $ours "RBLN_NUM_THREADS" . }}
{{- end }}
{{- end }}
{{- /* A name that is listed twice is an error for some tools: the user's value replaces ours. */}}
{{- range $name, $value := merge (dict) .Values.engine.env $ours }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}

{{/* extraEnv replaces variables of the same name. */}}
{{- define "rbln-serve.serverEnv" -}}
{{- $names := dict }}
{{- range .Values.extraEnv }}{{ $_ := set $names .name true }}{{ end }}
{{- $env := list }}
{{- range include "rbln-serve.chartEnv" . | fromYamlArray }}
{{- if not (hasKey $names .name) }}{{ $env = append $env . }}{{ end }}
{{- end }}
{{- concat $env .Values.extraEnv | toYaml }}
{{- end -}}

{{- define "rbln-serve.chartEnv" -}}
{{ include "rbln-serve.engineEnv" . }}
{{- if .Values.cache.readOnly }}
- {name: VLLM_RBLN_CACHE_READ_ONLY, value: "true"}
{{- end }}
- {name: RBLN_SERVE_PORT, value: "8000"}
{{- if include "rbln-serve.hasRole" . }}
- name: VLLM_NIXL_SIDE_CHANNEL_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: VLLM_NIXL_SIDE_CHANNEL_PORT, value: {{ .Values.prefillDecode.sideChannelPort | toString | quote }}}
{{- end }}
- {name: RBLN_SERVE_DRAIN_TIMEOUT_S, value: {{ .Values.shutdown.drainTimeoutSeconds | toString | quote }}}
{{- if .Values.data.enabled }}
- {name: RBLN_SERVE_DATA_DIR, value: /data/store}
{{- end }}
{{- if .Values.adapters.enabled }}
- {name: RBLN_SERVE_LORA_ROOT, value: /adapters}
{{- end }}
{{- if .Values.auth.apiKeys.secretName }}
- {name: RBLN_SERVE_API_KEY_FILE, value: /etc/rbln-serve/api-keys/keys}
{{- end }}
{{- if .Values.auth.adminKeys.secretName }}
- {name: RBLN_SERVE_ADMIN_KEY_FILE, value: /etc/rbln-serve/admin-keys/keys}
{{- end }}
{{- if .Values.tls.secretName }}
- {name: RBLN_SERVE_SSL_CERTFILE, value: /etc/rbln-serve/tls/tls.crt}
- {name: RBLN_SERVE_SSL_KEYFILE, value: /etc/rbln-serve/tls/tls.key}
- {name: RBLN_SERVE_ENABLE_SSL_REFRESH, value: "true"}
{{- end }}
{{- /* toJson: Helm's numbers are floats, which would print as 4.194304e+06. */}}
{{- range $name, $value := .Values.settings }}
- name: RBLN_SERVE_{{ upper $name }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- end -}}
