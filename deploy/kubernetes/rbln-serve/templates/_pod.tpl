{{/* The serving pod, shared by all kinds of workload. */}}

{{- define "rbln-serve.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities: {drop: [ALL]}
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Requests and limits including the device; takes a dict of `resources` and the root context. */}}
{{- define "rbln-serve.resources" -}}
{{- $device := .root.Values.device -}}
{{- $resources := deepCopy .resources -}}
{{- if $device.hostOnly -}}
{{- else if eq $device.kind "plugin" -}}
{{- $_ := set $resources "limits" (merge (dict $device.resource ($device.count | toString)) (default (dict) $resources.limits)) -}}
{{- else if eq $device.kind "dra" -}}
{{- $_ := set $resources "claims" (list (dict "name" "npu")) -}}
{{- end -}}
resources:
  {{- toYaml $resources | nindent 2 }}
{{- end -}}

{{- define "rbln-serve.nodeAffinity" -}}
{{- $device := .Values.device -}}
{{- $wanted := list -}}
{{- if and $device.nodeLabels (ne $device.kind "emulated") (not $device.hostOnly) -}}
{{- $wanted = append $wanted (dict "key" "rebellions.ai/npu.present" "operator" "In" "values" (list "true")) -}}
{{- if $device.family -}}
{{- $wanted = append $wanted (dict "key" "rebellions.ai/npu.family" "operator" "In" "values" (list $device.family)) -}}
{{- end -}}
{{- if $device.products -}}
{{- $wanted = append $wanted (dict "key" "rebellions.ai/npu.product" "operator" "In" "values" $device.products) -}}
{{- end -}}
{{- end -}}
{{- $affinity := deepCopy .Values.affinity -}}
{{- if $wanted -}}
{{- $node := default (dict) $affinity.nodeAffinity -}}
{{- $required := default (dict) $node.requiredDuringSchedulingIgnoredDuringExecution -}}
{{- /* Terms are alternatives, and a term's expressions must all hold: ours are added to each term. */ -}}
{{- $terms := list -}}
{{- range default (list (dict)) $required.nodeSelectorTerms -}}
{{- $terms = append $terms (merge (dict "matchExpressions" (concat $wanted (default (list) .matchExpressions))) .) -}}
{{- end -}}
{{- $required = merge (dict "nodeSelectorTerms" $terms) $required -}}
{{- $node = merge (dict "requiredDuringSchedulingIgnoredDuringExecution" $required) $node -}}
{{- $affinity = merge (dict "nodeAffinity" $node) $affinity -}}
{{- end -}}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Placement and user of server pods and of the pre-build job. */}}
{{- define "rbln-serve.placement" -}}
serviceAccountName: {{ include "rbln-serve.serviceAccountName" . }}
automountServiceAccountToken: false
# A Service named rbln-serve would set RBLN_SERVE_PORT and the like.
enableServiceLinks: false
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "rbln-serve.nodeAffinity" . }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if and (eq .Values.device.kind "dra") (not .Values.device.hostOnly) }}
resourceClaims:
  - name: npu
    resourceClaimTemplateName: {{ include "rbln-serve.claimTemplate" . }}
{{- end }}
{{- end -}}

{{/* The server's container. Only a LeaderWorkerSet adds a `command`; else the image's applies. */}}
{{- define "rbln-serve.serverContainer" -}}
name: server
image: {{ include "rbln-serve.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{ include "rbln-serve.containerSecurity" . }}
args:
  {{- include "rbln-serve.modelArgs" . | nindent 2 }}
env:
  {{- include "rbln-serve.serverEnv" . | nindent 2 }}
{{- with .Values.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - {name: http, containerPort: 8000, protocol: TCP}
  {{- if include "rbln-serve.hasRole" . }}
  - {name: nixl, containerPort: {{ .Values.prefillDecode.sideChannelPort }}, protocol: TCP}
  {{- end }}
  {{- with .Values.extraPorts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- include "rbln-serve.probes" . }}
{{ include "rbln-serve.lifecycle" . }}
{{ include "rbln-serve.resources" (dict "root" . "resources" (include "rbln-serve.withMemory" . | fromYaml)) }}
volumeMounts:
  {{- include "rbln-serve.commonMounts" . | nindent 2 }}
  {{- with include "rbln-serve.secretMounts" . }}
  {{- . | nindent 2 }}
  {{- end }}
  - {name: cache, mountPath: /cache, readOnly: {{ .Values.cache.readOnly }}}
  {{- if .Values.data.enabled }}
  - {name: data, mountPath: /data}
  {{- end }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "rbln-serve.podMetadata" -}}
labels:
  {{- include "rbln-serve.labels" . | nindent 2 }}
  app.kubernetes.io/component: server
  {{- with .Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "rbln-serve.podSpec" -}}
{{ include "rbln-serve.placement" . }}
terminationGracePeriodSeconds: {{ include "rbln-serve.gracePeriod" . }}
{{- if .Values.topologySpread.enabled }}
topologySpreadConstraints:
  - topologyKey: {{ .Values.topologySpread.topologyKey }}
    maxSkew: {{ .Values.topologySpread.maxSkew }}
    whenUnsatisfiable: {{ .Values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "rbln-serve.serverLabels" . | nindent 8 }}
    {{- if eq .Values.workload.kind "Deployment" }}
    # During a rollout only the new pods count.
    matchLabelKeys: [pod-template-hash]
    {{- end }}
{{- end }}
{{- with concat .Values.extraInitContainers (include "rbln-serve.initContainers" . | fromYamlArray) }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  {{- prepend .Values.extraContainers (include "rbln-serve.serverContainer" . | fromYaml) | toYaml | nindent 2 }}
volumes:
  {{- include "rbln-serve.serverVolumes" . | nindent 2 }}
{{- end -}}
