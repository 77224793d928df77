{{- define "triton-adapter.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "triton-adapter.fullname" -}}
{{- $name := include "triton-adapter.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{- define "triton-adapter.selector" -}}
app.kubernetes.io/name: {{ include "triton-adapter.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "triton-adapter.labels" -}}
{{- $own := dict
  "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_")
  "app.kubernetes.io/version" .Chart.AppVersion
  "app.kubernetes.io/managed-by" .Release.Service -}}
{{- toYaml (merge (fromYaml (include "triton-adapter.selector" .)) $own .Values.commonLabels) -}}
{{- end -}}

{{/* Labels of an object or pod plus its own, which commonLabels do not override: (list . labels) */}}
{{- define "triton-adapter.labelsWith" -}}
{{- $common := fromYaml (include "triton-adapter.labels" (index . 0)) -}}
{{- $selector := fromYaml (include "triton-adapter.selector" (index . 0)) -}}
{{- toYaml (merge $selector (deepCopy (index . 1)) $common) -}}
{{- end -}}

{{/* metadata of an object: (dict "root" . "suffix" "-x" "labels" map "annotations" map) */}}
{{- define "triton-adapter.metadata" -}}
{{- $suffix := default "" .suffix -}}
name: {{ include "triton-adapter.fullname" .root | trunc (int (sub 63 (len $suffix))) | trimSuffix "-" }}{{ $suffix }}
namespace: {{ include "triton-adapter.namespace" .root }}
labels:
  {{- include "triton-adapter.labelsWith" (list .root (default dict .labels)) | nindent 2 }}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* (dict "root" . "image" .Values.image) */}}
{{- define "triton-adapter.image" -}}
{{- $registry := default .image.registry .root.Values.global.imageRegistry -}}
{{- $own := ternary "triton-adapter-sagemaker" "triton-adapter" (eq "true" (include "triton-adapter.isSingle" .root)) -}}
{{- $repository := default $own .image.repository -}}
{{- $name := ternary $repository (printf "%s/%s" $registry $repository) (empty $registry) -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.pullSecrets" -}}
{{- $names := list -}}
{{- range concat .Values.global.imagePullSecrets .Values.imagePullSecrets -}}
{{- $names = append $names (kindIs "map" . | ternary (get (kindIs "map" . | ternary . dict) "name") .) -}}
{{- end -}}
{{- with $names | uniq -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "triton-adapter.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Whether helm test has a pod. It sends a model with its load, which needs the control token if the endpoint has keys */}}
{{- define "triton-adapter.hasTest" -}}
{{- $settings := fromYaml (include "triton-adapter.settings" .) -}}
{{- $files := get $settings "inline_files" | toString -}}
{{- $isLocked := and $settings.endpoint_keys (not .Values.adapter.controlToken.existingSecret) -}}
{{- if and (include "triton-adapter.isPod" .) .Values.tests.enabled .Values.service.http (not (has $files (list "off" "false"))) (not $isLocked) -}}
true
{{- end -}}
{{- end -}}

{{/* Whether the chart makes the pods itself */}}
{{- define "triton-adapter.isPod" -}}
{{- if ne .Values.mode "servingRuntime" }}true{{ end -}}
{{- end -}}

{{/* The name of the Deployment that ModelMesh's controller creates for the runtime */}}
{{- define "triton-adapter.meshName" -}}
{{- printf "%s-%s" .Values.servingRuntime.serviceName (include "triton-adapter.fullname" .) -}}
{{- end -}}

{{/* Whether one container has the adapter and Triton */}}
{{- define "triton-adapter.isSingle" -}}
{{- if eq .Values.mode "single" }}true{{ end -}}
{{- end -}}

{{/* Whether the pod has a container of Triton */}}
{{- define "triton-adapter.hasTriton" -}}
{{- if and (eq .Values.mode "pod") .Values.triton.enabled }}true{{ end -}}
{{- end -}}

{{- define "triton-adapter.isNative" -}}
{{- if and (include "triton-adapter.hasTriton" .) .Values.triton.nativeSidecar }}true{{ end -}}
{{- end -}}

{{/* Whether Triton runs outside the chart's pods */}}
{{- define "triton-adapter.isElsewhere" -}}
{{- if and (eq .Values.mode "pod") (not .Values.triton.enabled) }}true{{ end -}}
{{- end -}}

{{/* Whether each pod has a GPU, by count or by claim */}}
{{- define "triton-adapter.hasGpu" -}}
{{- if or (include "triton-adapter.gpus" . | int) .Values.triton.resourceClaims }}true{{ end -}}
{{- end -}}

{{/* GPUs of each pod */}}
{{- define "triton-adapter.gpus" -}}
{{- ternary 0 (int .Values.triton.gpu.count) (eq "true" (include "triton-adapter.isElsewhere" .)) -}}
{{- end -}}

{{/* The user's rules for PodMonitor and ServiceMonitor, as a map */}}
{{- define "triton-adapter.scrape" -}}
path: /metrics
{{- with .interval }}
interval: {{ . }}
{{- end }}
{{- with .scrapeTimeout }}
scrapeTimeout: {{ . }}
{{- end }}
{{- with .relabelings }}
relabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
