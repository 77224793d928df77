{{/* Whether calls load models from a store */}}
{{- define "triton-adapter.hasStore" -}}
{{- if or .Values.settings.model_store .Values.settings.endpoints }}true{{ end -}}
{{- end -}}

{{/* The cache's path, the same in all containers, as Triton's repository links to it */}}
{{- define "triton-adapter.cacheFolder" -}}
/var/cache/triton-adapter
{{- end -}}

{{- define "triton-adapter.keysFolder" -}}
/run/secrets/triton-adapter-keys
{{- end -}}

{{/* Settings derived from the volume and the secrets. statfs does not show an emptyDir's size limit */}}
{{- define "triton-adapter.endpointSettings" -}}
cache_dir: {{ include "triton-adapter.cacheFolder" . }}
{{- with .Values.endpoint.cache }}
{{- if eq .type "emptyDir" }}
cache_limit: {{ mulf 0.9 (include "triton-adapter.bytes" (list "endpoint.cache.size" .size) | int64) | floor | int64 | quote }}
{{- end }}
{{- end }}
{{- with .Values.endpoint.keys }}
endpoint_keys:
  {{- range . }}
  - {{ printf "%s file:%s/%s %s" .accessKey (include "triton-adapter.keysFolder" $) .accessKey (join " " .models) | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Mounts for (list . container): only the adapter writes the cache and reads the secrets */}}
{{- define "triton-adapter.endpointMounts" -}}
{{- $root := index . 0 -}}
{{- if include "triton-adapter.hasStore" $root -}}
{{- $cache := dict "name" "cache" "mountPath" (include "triton-adapter.cacheFolder" $root) -}}
{{- if eq (index . 1) "triton" -}}
- {{ toJson (set $cache "readOnly" true) }}
{{- else -}}
- {{ toJson $cache }}
{{- if $root.Values.endpoint.keys }}
- {name: endpoint-keys, mountPath: {{ include "triton-adapter.keysFolder" $root }}, readOnly: true}
{{- end }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.endpointVolumes" -}}
{{- if include "triton-adapter.hasStore" . -}}
{{- $cache := .Values.endpoint.cache -}}
- name: cache
  {{- if eq $cache.type "emptyDir" }}
  emptyDir: {sizeLimit: {{ $cache.size }}}
  {{- else if eq $cache.type "existingClaim" }}
  persistentVolumeClaim: {claimName: {{ $cache.existingClaim }}}
  {{- else }}
  ephemeral:
    volumeClaimTemplate:
      metadata:
        labels:
          {{- include "triton-adapter.labels" . | nindent 10 }}
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $cache.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ $cache.size }}
  {{- end }}
{{- with .Values.endpoint.keys }}
- name: endpoint-keys
  projected:
    sources:
      {{- range . }}
      - secret:
          name: {{ tpl .existingSecret $ }}
          items: [{key: {{ .key | quote }}, path: {{ .accessKey | quote }}}]
      {{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateEndpoint" -}}
{{- $endpoint := .Values.endpoint -}}
{{- $scaled := or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}
{{- $most := ternary .Values.autoscaling.maxReplicas .Values.replicaCount $scaled | int -}}
{{- if not (include "triton-adapter.hasStore" .) -}}
{{- range $key, $given := dict
  "endpoint.keys" $endpoint.keys
  "endpoint.credentials.existingSecret" $endpoint.credentials.existingSecret
  "endpoint.cache.existingClaim" $endpoint.cache.existingClaim -}}
{{- if $given -}}
{{- fail (printf "%s: needs a store; set settings.model_store or settings.endpoints" $key) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- if and (eq $endpoint.cache.type "existingClaim") (not $endpoint.cache.existingClaim) -}}
{{- fail "endpoint.cache.existingClaim: endpoint.cache.type=existingClaim needs the name of a claim" -}}
{{- end -}}
{{- if and (eq $endpoint.cache.type "existingClaim") (gt $most 1) -}}
{{- fail (printf "endpoint.cache.existingClaim: one adapter can use a cache, but there may be %d pods; use endpoint.cache.type=ephemeral, a claim per pod" $most) -}}
{{- end -}}
{{- if and (eq $endpoint.cache.type "ephemeral") (le (include "triton-adapter.bytes" (list "endpoint.cache.size" $endpoint.cache.size) | int64) 1073741824) -}}
{{- fail (printf "endpoint.cache.size: %s leaves no room: the adapter keeps 1Gi of the volume free" $endpoint.cache.size) -}}
{{- end -}}
{{- if and (eq $endpoint.cache.type "emptyDir") (hasKey .Values.settings "cache_limit") -}}
{{- fail "settings.cache_limit: the chart derives it from endpoint.cache.size, above which kubelet evicts the pod; set endpoint.cache.size" -}}
{{- end -}}
{{- $accessKeys := list -}}
{{- range $endpoint.keys -}}
{{- if has .accessKey $accessKeys -}}
{{- fail (printf "endpoint.keys: the access key %s occurs twice; each caller needs its own" .accessKey) -}}
{{- end -}}
{{- $accessKeys = append $accessKeys .accessKey -}}
{{- end -}}
{{- if and $endpoint.keys .Values.settings.endpoint_keys -}}
{{- fail "endpoint.keys: settings.endpoint_keys is set too; set one of them" -}}
{{- end -}}
{{- end -}}
{{- end -}}
