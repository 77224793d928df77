{{/* All settings that are given, the chart's own and the user's, as a map */}}
{{- define "triton-adapter.settings" -}}
{{- $own := dict -}}
{{- if include "triton-adapter.isPod" . -}}
{{- $drain := get .Values.settings "drain_timeout_seconds" | default 18 -}}
{{- $own = dict "model_roots" .Values.models.mountPath "drain_min_seconds" (min 5 $drain) -}}
{{- else -}}
{{- $own = dict
  "grpc" "unix:/mm-sock/rt.sock"
  "http" "off"
  "admin" "127.0.0.1:8081"
  "model_roots" "/models:/pvc_mounts"
  "load_concurrency" 2
  "modelmesh_load_timeout_seconds" 90
  "modelmesh_memory_buffer" "128MiB" -}}
{{- end -}}
{{- range $name, $value := .Values.settings -}}
{{- $_ := set $own $name $value -}}
{{- end -}}
{{- toYaml $own -}}
{{- end -}}

{{/* The text of one value in a variable: (list name value). YAML makes false of off, Helm floats of integers */}}
{{- define "triton-adapter.settingText" -}}
{{- $name := index . 0 -}}
{{- $value := index . 1 -}}
{{- if kindIs "slice" $value -}}
{{- join (get (dict "passthrough" "," "oom_patterns" "\n") $name | default ":") $value -}}
{{- else if and (kindIs "bool" $value) (not $value) (has $name (list "http" "grpc" "grpc_data" "admin" "memory_source")) -}}
off
{{- else if and (kindIs "float64" $value) (eq $value (floor $value)) -}}
{{- int64 $value -}}
{{- else -}}
{{- $value -}}
{{- end -}}
{{- end -}}

{{/* ADAPTER_NAME: text, sorted by name */}}
{{- define "triton-adapter.variables" -}}
{{- range $name, $value := fromYaml (include "triton-adapter.settings" .) }}
ADAPTER_{{ upper $name }}: {{ include "triton-adapter.settingText" (list $name $value) | quote }}
{{- end }}
{{- end -}}

{{/* A number of seconds among the settings, or the adapter's own default: (list . name default) */}}
{{- define "triton-adapter.seconds" -}}
{{- $settings := fromYaml (include "triton-adapter.settings" (index . 0)) -}}
{{- ceil (get $settings (index . 1) | default (index . 2)) | int -}}
{{- end -}}

{{/* The port of a listener, empty when it is off or a socket: (list . name) */}}
{{- define "triton-adapter.port" -}}
{{- $settings := fromYaml (include "triton-adapter.settings" (index . 0)) -}}
{{- $name := index . 1 -}}
{{- $defaults := dict "http" 8080 "grpc" 8085 "admin" 8081 -}}
{{- if hasKey $settings $name -}}
{{- $door := get $settings $name | toString -}}
{{- if not (or (hasPrefix "unix:" $door) (has $door (list "off" "false"))) -}}
{{- splitList ":" $door | last -}}
{{- end -}}
{{- else -}}
{{- get $defaults $name -}}
{{- end -}}
{{- end -}}

{{/* How long the adapter may take from the begin of its end, its preStop hook included */}}
{{- define "triton-adapter.drainSeconds" -}}
{{- add (int .Values.adapter.preStopSeconds)
  (include "triton-adapter.seconds" (list . "drain_timeout_seconds" 18)) -}}
{{- end -}}

{{/* What Triton in a plain container waits before its end: longer than the adapter drains */}}
{{- define "triton-adapter.tritonPreStopSeconds" -}}
{{- ternary 0 (add 2 (include "triton-adapter.drainSeconds" .)) .Values.triton.nativeSidecar -}}
{{- end -}}

{{/* The least grace period: drain, then Triton's own end */}}
{{- define "triton-adapter.leastGraceSeconds" -}}
{{- add (max (include "triton-adapter.drainSeconds" . | int) (include "triton-adapter.tritonPreStopSeconds" . | int))
  (int .Values.triton.exitTimeoutSeconds) -}}
{{- end -}}

{{- define "triton-adapter.graceSeconds" -}}
{{- default (add 5 (include "triton-adapter.leastGraceSeconds" .)) .Values.terminationGracePeriodSeconds | int -}}
{{- end -}}
