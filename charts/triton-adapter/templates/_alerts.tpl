{{/* Whether a rule has no place here: (list . alert). Where there may be no pod, its absence is no fault; ModelMesh names
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

{{/* What finds the series of this release alone. A name that Kubernetes may cut off is matched by its beginning; the pods of
     a ServingRuntime have names that ModelMesh's controller makes */}}
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

{{/* Seconds that the probes of the pod allow its start, but not less than the rules do by themselves */}}
{{- define "triton-adapter.longestStart" -}}
{{- $start := include "triton-adapter.seconds" (list . "start_timeout_seconds" 120) | int -}}
{{- $load := include "triton-adapter.seconds" (list . "load_timeout_seconds" 350) | int -}}
{{- max 600 (add $start $load 60) -}}
{{- end -}}
