{{/* files/dashboard.json for this release. Grafana accepts each uid, and each title in a folder, only once. The dashboard
     shows the release's namespace and pods until the reader selects others */}}
{{- define "triton-adapter.dashboard" -}}
{{- $namespace := include "triton-adapter.namespace" . -}}
{{- $release := printf "%s/%s" $namespace (include "triton-adapter.fullname" .) -}}
{{- $dashboard := .Files.Get "files/dashboard.json" | fromJson -}}
{{- $_ := set $dashboard "uid" (printf "triton-adapter-%s" (sha256sum $release | trunc 16)) -}}
{{- $_ := set $dashboard "title" (printf "triton-adapter %s" $release) -}}
{{- range $dashboard.templating.list -}}
{{- if eq .name "namespace" -}}
{{- $_ := set . "current" (dict "text" $namespace "value" $namespace) -}}
{{- else if and (eq .name "pod") (include "triton-adapter.isPod" $) -}}
{{- $_ := set . "allValue" (include "triton-adapter.podPattern" $) -}}
{{- $_ := set . "regex" (printf "/^%s$/" (include "triton-adapter.podPattern" $)) -}}
{{- end -}}
{{- end -}}
{{- toPrettyJson $dashboard -}}
{{- end -}}
