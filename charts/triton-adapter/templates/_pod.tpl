{{/* The spec of the pod: the chart's own, and podSpec over it */}}
{{- define "triton-adapter.pod" -}}
{{- $own := include "triton-adapter.podSpec" . -}}
{{- if .Values.podSpec -}}
{{- $spec := fromYaml $own -}}
{{- range $key := list "initContainers" "containers" -}}
{{- range $container := get $spec $key | default list -}}
{{- range get $.Values.podSpec $key | default list -}}
{{- if eq .name $container.name -}}
{{- $_ := mergeOverwrite $container (deepCopy .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite $spec (omit (deepCopy .Values.podSpec) "initContainers" "containers")) -}}
{{- else -}}
{{- $own -}}
{{- end -}}
{{- end -}}

{{/* Refuses a podSpec that would remove a list entry of the chart: (list path given own) */}}
{{- define "triton-adapter.refuseLists" -}}
{{- $path := index . 0 -}}
{{- $own := index . 2 -}}
{{- range $key, $value := index . 1 -}}
{{- $there := get $own $key -}}
{{- if and $there (kindIs "slice" $there) -}}
{{- fail (printf "%s.%s: this would replace the chart's own list; use the chart's keys to add to it" $path $key) -}}
{{- else if and (kindIs "map" $there) (kindIs "map" $value) -}}
{{- include "triton-adapter.refuseLists" (list (printf "%s.%s" $path $key) $value $there) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validatePodSpec" -}}
{{- $given := .Values.podSpec -}}
{{- range $key, $instead := dict
  "serviceAccountName" "serviceAccount.name"
  "terminationGracePeriodSeconds" "terminationGracePeriodSeconds"
  "enableServiceLinks" "adapter.extraEnv"
  "restartPolicy" "nothing: pods of a Deployment are always restarted" -}}
{{- if hasKey $given $key -}}
{{- fail (printf "podSpec.%s: the chart sets this; use %s" $key $instead) -}}
{{- end -}}
{{- end -}}
{{- $own := fromYaml (include "triton-adapter.podSpec" .) -}}
{{- range $key := list "initContainers" "containers" -}}
{{- $there := dict -}}
{{- range get $own $key | default list -}}
{{- $_ := set $there .name . -}}
{{- end -}}
{{- $extra := ternary "extraInitContainers" "extraContainers" (eq $key "initContainers") -}}
{{- range get $given $key | default list -}}
{{- $name := get . "name" | toString -}}
{{- if not (hasKey $there $name) -}}
{{- fail (printf "podSpec.%s: the chart has no %s, and this only changes existing ones; use %s to add one" $key $name $extra) -}}
{{- end -}}
{{- include "triton-adapter.refuseLists" (list (printf "podSpec.%s.%s" $key $name) . (get $there $name)) -}}
{{- end -}}
{{- end -}}
{{- include "triton-adapter.refuseLists" (list "podSpec" (omit $given "initContainers" "containers") $own) -}}
{{- end -}}

{{- define "triton-adapter.podSpec" -}}
{{ with include "triton-adapter.pullSecrets" . -}}
{{ . }}
{{ end -}}
serviceAccountName: {{ include "triton-adapter.serviceAccountName" . }}
automountServiceAccountToken: false
# A Service called runtime would give every container a RUNTIME_PORT, which the adapter reads
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "triton-adapter.graceSeconds" . }}
{{- with .Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .Values.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.hostAliases }}
hostAliases:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.triton.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- tpl (toYaml .) $ | nindent 2 }}
{{- end }}
{{- if or (include "triton-adapter.isNative" .) .Values.extraInitContainers }}
initContainers:
  {{- with .Values.extraInitContainers }}
  {{- tpl (toYaml .) $ | nindent 2 }}
  {{- end }}
  {{- if include "triton-adapter.isNative" . }}
  {{- include "triton-adapter.tritonContainer" . | nindent 2 }}
  {{- end }}
{{- end }}
containers:
  {{- include "triton-adapter.adapterContainer" . | nindent 2 }}
  {{- if and (include "triton-adapter.hasTriton" .) (not .Values.triton.nativeSidecar) }}
  {{- include "triton-adapter.tritonContainer" . | nindent 2 }}
  {{- end }}
  {{- with .Values.extraContainers }}
  {{- tpl (toYaml .) $ | nindent 2 }}
  {{- end }}
volumes:
  {{- include "triton-adapter.volumes" . | nindent 2 }}
{{- end -}}
