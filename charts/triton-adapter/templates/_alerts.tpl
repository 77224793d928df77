{{/* Whether to omit a rule: (list . alert). A release that may have no pod must not alert on its absence; ModelMesh names
     its pods itself */}}
{{- define "triton-adapter.isLeftOut" -}}
{{- $root := index . 0 -}}
{{- $alert := index . 1 -}}
{{- $pods := ternary $root.Values.autoscaling.minReplicas $root.Values.replicaCount (or $root.Values.autoscaling.hpa.enabled $root.Values.autoscaling.keda.enabled) -}}
{{- $none := or (not (include "triton-adapter.isPod" $root)) (not $pods) -}}
{{- if or (has $alert $root.Values.metrics.prometheusRule.disabled) (and (eq $alert "TritonAdapterAbsent") $none) -}}
true
{{- end -}}
{{- end -}}

{{/* A rule of files/alerts.yaml for this release: (list . rule) */}}
{{- define "triton-adapter.rule" -}}
{{- $root := index . 0 -}}
{{- $rule := index . 1 -}}
{{- $own := $root.Values.metrics.prometheusRule -}}
{{- $expr := $rule.expr | replace "pod=~\".*\"" (include "triton-adapter.ruleScope" $root) -}}
{{- if hasKey $own.thresholds $rule.alert -}}
{{- $expr = regexReplaceAll "[0-9.]+ # threshold" $expr (printf "%v # threshold" (get $own.thresholds $rule.alert)) -}}
{{- end -}}
{{- $start := include "triton-adapter.longestStart" $root | int -}}
{{- $expr = $expr | replace "< 600" (printf "< %d" $start) -}}
{{- $annotations := $rule.annotations -}}
{{- with $own.runbookBaseUrl -}}
{{- $url := printf "%s#%s" . (lower $rule.alert) -}}
{{- $annotations = merge (dict "runbook_url" $url) (omit $annotations "runbook") -}}
{{- end -}}
{{- $labels := merge (deepCopy $rule.labels) $own.additionalRuleLabels -}}
{{- with get $own.severities $rule.alert -}}
{{- $_ := set $labels "severity" . -}}
{{- end -}}
{{- $made := dict "expr" $expr "labels" $labels "annotations" $annotations -}}
{{- if and (eq $rule.alert "TritonAdapterNoneReady") (gt $start 600) -}}
{{- $_ := set $made "for" (printf "%ds" $start) -}}
{{- end -}}
- {{ toYaml (merge $made (omit $rule "annotations")) | nindent 2 | trim }}
{{- end -}}

{{/* Selects the series of this release only. It matches the beginning of names that Kubernetes may truncate; ModelMesh's
     controller names the pods of a ServingRuntime */}}
{{- define "triton-adapter.ruleScope" -}}
{{- if include "triton-adapter.isPod" . -}}
namespace="{{ include "triton-adapter.namespace" . }}",pod=~"{{ include "triton-adapter.podPattern" . }}"
{{- else if .Values.servingRuntime.clusterScoped -}}
pod=~"{{ include "triton-adapter.podPattern" . }}"
{{- else -}}
namespace="{{ include "triton-adapter.namespace" . }}",pod=~"{{ include "triton-adapter.podPattern" . }}"
{{- end -}}
{{- end -}}

{{- define "triton-adapter.podPattern" -}}
{{- $name := include (ternary "triton-adapter.fullname" "triton-adapter.meshName" (eq "true" (include "triton-adapter.isPod" .))) . -}}
{{- if gt (len $name) 40 -}}
{{ trunc 40 $name }}.+
{{- else -}}
{{ $name }}-[a-z0-9]+-[a-z0-9]+
{{- end -}}
{{- end -}}

{{/* Seconds that the pod's probes allow for its start, at least those in the rules */}}
{{- define "triton-adapter.longestStart" -}}
{{- $start := include "triton-adapter.seconds" (list . "start_timeout_seconds" 120) | int -}}
{{- $load := include "triton-adapter.seconds" (list . "load_timeout_seconds" 350) | int -}}
{{- max 600 (add $start $load 60) -}}
{{- end -}}
