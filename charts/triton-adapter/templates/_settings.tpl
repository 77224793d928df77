{{/* All settings as a map: the chart's own and the user's */}}
{{- define "triton-adapter.settings" -}}
{{- $own := dict -}}
{{- if include "triton-adapter.isPod" . -}}
{{- $drain := get .Values.settings "drain_timeout_seconds" | default 18 -}}
{{- $host := get .Values.settings "listen_host" | default "::" -}}
{{- $own = dict "listen_host" "::" "metrics" (printf "%s:8082" (ternary (printf "[%s]" $host) $host (contains ":" $host)))
  "model_roots" .Values.models.mountPath "drain_min_seconds" (min 5 $drain) -}}
{{- with .Values.models.load -}}
{{- $_ := set $own "load_at_start" . -}}
{{- end -}}
{{- if include "triton-adapter.isSingle" . -}}
{{- $arguments := prepend .Values.triton.extraArgs (printf "--model-load-thread-count=%d" (int .Values.triton.modelLoadThreads)) -}}
{{- $own = merge $own (dict "triton" "embedded" "repository" "/models/_triton_models" "triton_args" $arguments) -}}
{{- if .Values.triton.exposeMetrics -}}
{{- $_ := set $own "triton_metrics" "0.0.0.0:8002" -}}
{{- end -}}
{{- else if include "triton-adapter.isElsewhere" . -}}
{{- $host := .Values.triton.address -}}
{{- $host = ternary (printf "[%s]" $host) $host (contains ":" $host) -}}
{{- range $name, $port := .Values.triton.ports -}}
{{- $_ := set $own (printf "triton_%s" $name) (printf "%s:%d" $host (int $port)) -}}
{{- end -}}
{{- $own = merge $own (dict "staging" "upload" "repository" "/models/_triton_models") -}}
{{- end -}}
{{- with include "triton-adapter.memoryLimit" . -}}
{{- $_ := set $own "memory_limit" . -}}
{{- end -}}
{{- if include "triton-adapter.hasStore" . -}}
{{- $own = merge $own (fromYaml (include "triton-adapter.endpointSettings" .)) -}}
{{- end -}}
{{- else -}}
{{- $own = dict
  "grpc" "unix:/mm-sock/rt.sock"
  "http" "off"
  "admin" "127.0.0.1:8081"
  "model_roots" "/models:/pvc_mounts"
  "load_concurrency" 2
  "load_timeout_seconds" 90 -}}
{{- if .Values.metrics.podMonitor.enabled -}}
{{- $_ := set $own "metrics" "[::]:8082" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.triton.exposeMetrics (hasPrefix "ipv6:" .Values.triton.metricsAddress) -}}
{{- $_ := set $own "triton_metrics" "[::1]:8002" -}}
{{- end -}}
{{- if .Values.adapter.controlToken.existingSecret -}}
{{- $_ := set $own "control_token" (printf "file:%s" (include "triton-adapter.tokenFile" .)) -}}
{{- end -}}
{{- range $name, $value := .Values.settings -}}
{{- $_ := set $own $name $value -}}
{{- end -}}
{{- toYaml $own -}}
{{- end -}}

{{/* The text of a value for its variable: (list name value). Only endpoints are maps. YAML reads off as false, and Helm integers as floats */}}
{{- define "triton-adapter.settingText" -}}
{{- $name := index . 0 -}}
{{- $value := index . 1 -}}
{{- if eq $name "triton_args" -}}
{{- $words := list -}}
{{- range $value -}}
{{- $words = append $words (include "triton-adapter.shellWord" .) -}}
{{- end -}}
{{- join " " $words -}}
{{- else if kindIs "slice" $value -}}
{{- join (get (dict "passthrough" "," "allowed_hosts" "," "model_roots" ":" "load_at_start" ":" "single_model" ":") $name | default "\n") $value -}}
{{- else if kindIs "map" $value -}}
{{- $lines := list -}}
{{- range $endpoint, $store := $value -}}
{{- $lines = append $lines (printf "%s=%s" $endpoint (kindIs "map" $store | ternary (get (kindIs "map" $store | ternary $store dict) "models") $store)) -}}
{{- end -}}
{{- join "\n" $lines -}}
{{- else if and (kindIs "bool" $value) (eq $name "inline_files") -}}
{{- ternary "on" "off" $value -}}
{{- else if and (kindIs "bool" $value) (not $value) (has $name (list "http" "http_data" "grpc" "grpc_data" "admin" "metrics" "memory_source")) -}}
off
{{- else if and (kindIs "float64" $value) (eq $value (floor $value)) -}}
{{- int64 $value -}}
{{- else -}}
{{- $value -}}
{{- end -}}
{{- end -}}

{{/* A word quoted for a shell */}}
{{- define "triton-adapter.shellWord" -}}
{{- ternary . (printf "'%s'" (replace "'" "'\\''" .)) (regexMatch "^[-A-Za-z0-9_./:=,]+$" .) -}}
{{- end -}}

{{/* ADAPTER_NAME: text, sorted by name */}}
{{- define "triton-adapter.variables" -}}
{{- range $name, $value := fromYaml (include "triton-adapter.settings" .) }}
ADAPTER_{{ upper $name }}: {{ include "triton-adapter.settingText" (list $name $value) | quote }}
{{- end }}
{{- end -}}

{{/* A setting in seconds, or the adapter's default: (list . name default) */}}
{{- define "triton-adapter.seconds" -}}
{{- $settings := fromYaml (include "triton-adapter.settings" (index . 0)) -}}
{{- ceil (get $settings (index . 1) | default (index . 2)) | int -}}
{{- end -}}

{{/* The port of a listener; empty if it is off or a socket: (list . name) */}}
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
{{- get $defaults $name | default "" -}}
{{- end -}}
{{- end -}}

{{/* Path of the control token in the containers */}}
{{- define "triton-adapter.tokenFile" -}}
/run/secrets/triton-adapter/token
{{- end -}}

{{/* The listener that serves /metrics and the probes: the name of its setting and of its port */}}
{{- define "triton-adapter.probes" -}}
{{- ternary "metrics" "admin" (not (empty (include "triton-adapter.port" (list . "metrics")))) -}}
{{- end -}}

{{/* Longest time from the start of the adapter's shutdown to its end, including its preStop hook */}}
{{- define "triton-adapter.drainSeconds" -}}
{{- add (int .Values.adapter.preStopSeconds)
  (include "triton-adapter.seconds" (list . "drain_timeout_seconds" 18)) -}}
{{- end -}}

{{/* Seconds that Triton in a plain container waits before it ends: longer than the adapter's drain */}}
{{- define "triton-adapter.tritonPreStopSeconds" -}}
{{- if and (include "triton-adapter.hasTriton" .) (not .Values.triton.nativeSidecar) -}}
{{- add 2 (include "triton-adapter.drainSeconds" .) -}}
{{- else -}}0
{{- end -}}
{{- end -}}

{{/* Seconds that Triton's exit may take; an embedded Triton has up to 8 s */}}
{{- define "triton-adapter.exitSeconds" -}}
{{- if include "triton-adapter.isSingle" . }}8{{ else if include "triton-adapter.hasTriton" . }}{{ int .Values.triton.exitTimeoutSeconds }}{{ else }}0{{ end -}}
{{- end -}}

{{/* The shortest grace period: the drain, then Triton's exit */}}
{{- define "triton-adapter.leastGraceSeconds" -}}
{{- add (max (include "triton-adapter.drainSeconds" . | int) (include "triton-adapter.tritonPreStopSeconds" . | int))
  (include "triton-adapter.exitSeconds" . | int) -}}
{{- end -}}

{{- define "triton-adapter.graceSeconds" -}}
{{- default (add 5 (include "triton-adapter.leastGraceSeconds" .)) .Values.terminationGracePeriodSeconds | int -}}
{{- end -}}

{{/* Two adapters must never share a Triton or a cache: then the old pod must be gone before the new one starts. If the GPU
     or the claim is busy, an old pod ends before a new one starts. Of one pod maxUnavailable must not allow that: Helm 3
     waits for replicas less maxUnavailable, which is none. A scaler adds pods beside those that run, so one more may start */}}
{{- define "triton-adapter.strategy" -}}
{{- $isScaled := or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}
{{- $replicas := ternary .Values.autoscaling.minReplicas .Values.replicaCount $isScaled | int -}}
{{- if or (include "triton-adapter.isElsewhere" .) (and (include "triton-adapter.hasStore" .) (eq .Values.endpoint.cache.type "existingClaim")) -}}
type: Recreate
{{- else if or (include "triton-adapter.hasGpu" .) (include "triton-adapter.isClaimOfOneNode" .) -}}
{{- if gt $replicas 1 -}}
type: RollingUpdate
rollingUpdate: {maxSurge: 0, maxUnavailable: 1}
{{- else if $isScaled -}}
type: RollingUpdate
rollingUpdate: {maxSurge: 1, maxUnavailable: 0}
{{- else -}}
type: Recreate
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.isClaimOfOneNode" -}}
{{- if and (eq .Values.models.type "pvc") (not (or (has "ReadWriteMany" .Values.models.pvc.accessModes) (has "ReadOnlyMany" .Values.models.pvc.accessModes))) -}}
true
{{- end -}}
{{- end -}}

{{/* The time that the probes allow for a start, plus ten minutes to pull images */}}
{{- define "triton-adapter.progressSeconds" -}}
{{- $start := include "triton-adapter.seconds" (list . "start_timeout_seconds" 120) | int -}}
{{- $load := include "triton-adapter.seconds" (list . "load_timeout_seconds" 350) | int -}}
{{- add 600 (ternary .Values.triton.startSeconds 0 (eq "true" (include "triton-adapter.isNative" .))) $start $load -}}
{{- end -}}

{{/* Memory for models without a GPU: the limit of Triton's container, less its shared memory, which counts towards the limit,
     and less 128 MiB for an adapter in the same container. Empty: the container has no limit */}}
{{- define "triton-adapter.memoryLimit" -}}
{{- $memory := dig "limits" "memory" "" (.Values.triton.resources | default dict) -}}
{{- if and $memory (not (include "triton-adapter.hasGpu" .)) (not (include "triton-adapter.isElsewhere" .)) -}}
{{- $others := list (.Values.triton.shmSize | default "0") (ternary "128Mi" "0" (eq "true" (include "triton-adapter.isSingle" .))) -}}
{{- $left := include "triton-adapter.bytes" (list "triton" $memory) | int64 -}}
{{- range $others -}}
{{- $left = sub $left (include "triton-adapter.bytes" (list "triton" .) | int64) -}}
{{- end -}}
{{- $left -}}
{{- end -}}
{{- end -}}

{{/* A size in the form of the settings, such as 8GiB or 1.5 gb, as a Kubernetes quantity */}}
{{- define "triton-adapter.quantity" -}}
{{- $text := . | nospace | upper | trimSuffix "B" -}}
{{- $text | replace "I" "i" | replace "Ki" "ki" | replace "K" "k" | replace "ki" "Ki" -}}
{{- end -}}

{{/* Bytes of a quantity such as 8Gi, 500M or 1e9: (list key quantity) */}}
{{- define "triton-adapter.bytes" -}}
{{- $text := index . 1 | toString -}}
{{- $number := regexFind "^[0-9.]+([eE][+-]?[0-9]+)?" $text -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000
  "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := trimPrefix $number $text -}}
{{- if not (hasKey $units $unit) -}}
{{- fail (printf "%s: %s is not a quantity of bytes" (index . 0) $text) -}}
{{- end -}}
{{- mulf (float64 $number) (get $units $unit) | int64 -}}
{{- end -}}
