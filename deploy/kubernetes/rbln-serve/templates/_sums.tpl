{{/* Sums of quantities: memory, threads. */}}

{{/* A quantity of bytes in MiB, rounded up. */}}
{{- define "rbln-serve.mebibytes" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- divf (mulf (float64 $number) (float64 (get $units (trimPrefix $number $text)))) 1048576 | ceil | int64 -}}
{{- end -}}

{{/* A quantity of processors in thousandths. */}}
{{- define "rbln-serve.millicores" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text -}}{{- trimSuffix "m" $text | int64 -}}
{{- else -}}{{- mulf (float64 $text) 1000 | ceil | int64 -}}
{{- end -}}
{{- end -}}

{{/* MiB of a server with its ranks; files in /dev/shm count against the container's limit. */}}
{{- define "rbln-serve.memorySum" -}}
{{- $memory := .Values.memory -}}
{{- $ranks := mul (include "rbln-serve.mebibytes" $memory.perDevice | int64) (int64 .Values.device.count) -}}
{{- add (include "rbln-serve.mebibytes" $memory.base | int64) $ranks (include "rbln-serve.mebibytes" $memory.model | int64) (include "rbln-serve.mebibytes" .Values.shmSize | int64) -}}
{{- end -}}

{{/* `resources` with memory: by default the sum, as request and as limit. */}}
{{- define "rbln-serve.withMemory" -}}
{{- $given := .Values.resources -}}
{{- $requests := default (dict) $given.requests -}}
{{- $limits := default (dict) $given.limits -}}
{{- $sum := printf "%sMi" (include "rbln-serve.memorySum" .) -}}
{{- $limit := default (default $sum $requests.memory) $limits.memory -}}
{{- dict "requests" (merge (dict "memory" (default $limit $requests.memory)) $requests) "limits" (merge (dict "memory" $limit) $limits) | toYaml -}}
{{- end -}}

{{/* Threads of a rank by the CPU request, if no CPU limit says it: a request alone does not show
     in a container, and a node's cores may be many times as many. */}}
{{- define "rbln-serve.threads" -}}
{{- $requested := dig "requests" "cpu" "" .Values.resources -}}
{{- if and $requested (not (dig "limits" "cpu" "" .Values.resources)) -}}
{{- div (include "rbln-serve.millicores" $requested | int64) (mul 1000 (int64 .Values.device.count)) | max 1 -}}
{{- end -}}
{{- end -}}
