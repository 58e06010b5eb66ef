{{/* Volumes and mounts. Only /tmp, /dev/shm, the cache and adapters are writable. */}}

{{- define "rbln-serve.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .Values.tmpSize }}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.shmSize }}}
{{- $claims := and (eq .Values.workload.kind "StatefulSet") .Values.cache.persistence.enabled (not .Values.cache.persistence.existingClaim) }}
{{- if not .Values.cache.persistence.enabled }}
- name: cache
  emptyDir: {sizeLimit: {{ .Values.cache.emptyDirSize }}}
{{- else if not $claims }}
- name: cache
  persistentVolumeClaim: {claimName: {{ include "rbln-serve.cacheClaim" . }}}
{{- end }}
{{- if .Values.model.download.repository }}
- name: models
  {{- with .Values.model.download.claimName }}
  persistentVolumeClaim: {claimName: {{ . }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.model.download.size }}}
  {{- end }}
{{- end }}
{{- with .Values.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.adapters.enabled }}
- name: adapters
  {{- toYaml (.Values.adapters.volume | default (dict "emptyDir" (dict))) | nindent 2 }}
{{- end }}
{{- end -}}

{{/* For servers only: a job needs no secrets. */}}
{{- define "rbln-serve.serverVolumes" -}}
{{ include "rbln-serve.volumes" . }}
{{- if .Values.cache.import.enabled }}
- name: bundle
  {{- toYaml .Values.cache.import.volume | nindent 2 }}
{{- end }}
{{- with .Values.auth.apiKeys }}{{ if .secretName }}
- name: api-keys
  secret: {secretName: {{ .secretName }}, defaultMode: 0440, items: [{key: {{ .key }}, path: keys}]}
{{- end }}{{ end }}
{{- with .Values.auth.adminKeys }}{{ if .secretName }}
- name: admin-keys
  secret: {secretName: {{ .secretName }}, defaultMode: 0440, items: [{key: {{ .key }}, path: keys}]}
{{- end }}{{ end }}
{{- with .Values.tls.secretName }}
- name: tls
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* For every container that runs the image: cache and model. */}}
{{- define "rbln-serve.commonMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if or .Values.model.volume .Values.model.download.repository }}
- name: models
  mountPath: /models
  readOnly: true
  {{- with .Values.model.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- end }}
{{- if .Values.adapters.enabled }}
- name: adapters
  mountPath: /adapters
  readOnly: {{ .Values.adapters.readOnly }}
  {{- with .Values.adapters.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Whole directories, never a subPath: only they follow changes of a Secret. */}}
{{- define "rbln-serve.secretMounts" -}}
{{- if .Values.auth.apiKeys.secretName }}
- {name: api-keys, mountPath: /etc/rbln-serve/api-keys, readOnly: true}
{{- end }}
{{- if .Values.auth.adminKeys.secretName }}
- {name: admin-keys, mountPath: /etc/rbln-serve/admin-keys, readOnly: true}
{{- end }}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /etc/rbln-serve/tls, readOnly: true}
{{- end }}
{{- end -}}
