{{/* All settings that are given, the chart's own and the user's, as a map */}}
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
  "modelmesh_load_timeout_seconds" 90
  "modelmesh_memory_buffer" "128MiB" -}}
{{- if .Values.metrics.podMonitor.enabled -}}
{{- $_ := set $own "metrics" "[::]:8082" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.triton.exposeMetrics (hasPrefix "ipv6:" .Values.triton.metricsAddress) -}}
{{- $_ := set $own "triton_metrics" "[::1]:8002" -}}
{{- end -}}
{{- if .Values.adapter.controlToken.existingSecret -}}
{{- $_ := set $own "control_token_file" (include "triton-adapter.tokenFile" .) -}}
{{- end -}}
{{- range $name, $value := .Values.settings -}}
{{- $_ := set $own $name $value -}}
{{- end -}}
{{- toYaml $own -}}
{{- end -}}

{{/* The text of one value in a variable: (list name value). Of maps there are endpoints alone. YAML makes false of off, Helm floats of integers */}}
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
{{- join (get (dict "passthrough" "," "allowed_hosts" "," "model_roots" ":" "load_at_start" ":") $name | default "\n") $value -}}
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

{{/* A word that a shell takes for itself */}}
{{- define "triton-adapter.shellWord" -}}
{{- ternary . (printf "'%s'" (replace "'" "'\\''" .)) (regexMatch "^[-A-Za-z0-9_./:=,]+$" .) -}}
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
{{- get $defaults $name | default "" -}}
{{- end -}}
{{- end -}}

{{/* Where the containers find the control token */}}
{{- define "triton-adapter.tokenFile" -}}
/run/secrets/triton-adapter/token
{{- end -}}

{{/* The listener that has /metrics and the probes, by its setting, which is its port's name too */}}
{{- define "triton-adapter.probes" -}}
{{- ternary "metrics" "admin" (not (empty (include "triton-adapter.port" (list . "metrics")))) -}}
{{- end -}}

{{/* How long the adapter may take from the begin of its end, its preStop hook included */}}
{{- define "triton-adapter.drainSeconds" -}}
{{- add (int .Values.adapter.preStopSeconds)
  (include "triton-adapter.seconds" (list . "drain_timeout_seconds" 18)) -}}
{{- end -}}

{{/* What Triton in a plain container waits before its end: longer than the adapter drains */}}
{{- define "triton-adapter.tritonPreStopSeconds" -}}
{{- if and (include "triton-adapter.hasTriton" .) (not .Values.triton.nativeSidecar) -}}
{{- add 2 (include "triton-adapter.drainSeconds" .) -}}
{{- else -}}0
{{- end -}}
{{- end -}}

{{/* How long Triton's own end may take: the embedded one has up to 8 s */}}
{{- define "triton-adapter.exitSeconds" -}}
{{- if include "triton-adapter.isSingle" . }}8{{ else if include "triton-adapter.hasTriton" . }}{{ int .Values.triton.exitTimeoutSeconds }}{{ else }}0{{ end -}}
{{- end -}}

{{/* The least grace period: drain, then Triton's own end */}}
{{- define "triton-adapter.leastGraceSeconds" -}}
{{- add (max (include "triton-adapter.drainSeconds" . | int) (include "triton-adapter.tritonPreStopSeconds" . | int))
  (include "triton-adapter.exitSeconds" . | int) -}}
{{- end -}}

{{- define "triton-adapter.graceSeconds" -}}
{{- default (add 5 (include "triton-adapter.leastGraceSeconds" .)) .Values.terminationGracePeriodSeconds | int -}}
{{- end -}}

{{/* Where a new pod cannot start beside an old one, for want of a GPU or of the claim, the old one goes first. Two adapters
     at one Triton would load into each other's way, and a cache is for one adapter: there it has to be gone */}}
{{- define "triton-adapter.strategy" -}}
{{- if or (include "triton-adapter.isElsewhere" .) (and (include "triton-adapter.hasStore" .) (eq .Values.endpoint.cache.type "existingClaim")) -}}
type: Recreate
{{- else if or (include "triton-adapter.hasGpu" .) (include "triton-adapter.isClaimOfOneNode" .) -}}
type: RollingUpdate
rollingUpdate: {maxSurge: 0, maxUnavailable: 1}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.isClaimOfOneNode" -}}
{{- if and (eq .Values.models.type "pvc") (not (or (has "ReadWriteMany" .Values.models.pvc.accessModes) (has "ReadOnlyMany" .Values.models.pvc.accessModes))) -}}
true
{{- end -}}
{{- end -}}

{{/* What the probes allow a pod for its start, and ten minutes to pull images */}}
{{- define "triton-adapter.progressSeconds" -}}
{{- $start := include "triton-adapter.seconds" (list . "start_timeout_seconds" 120) | int -}}
{{- $load := include "triton-adapter.seconds" (list . "load_timeout_seconds" 350) | int -}}
{{- add 600 (ternary .Values.triton.startSeconds 0 (eq "true" (include "triton-adapter.isNative" .))) $start $load -}}
{{- end -}}

{{/* What models may take where no GPU is measured: what Triton's container may, less its shared memory, which counts there,
     and less 128 MiB for an adapter in the same container. Empty: nobody says */}}
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

{{/* A size such as 8GiB or 1.5 gb, as the settings take it, as a quantity of Kubernetes */}}
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
