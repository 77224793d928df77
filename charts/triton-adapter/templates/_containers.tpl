{{/* Arguments of tritonserver, one a line */}}
{{- define "triton-adapter.tritonArgs" -}}
- --model-repository=/models/_triton_models
- --model-control-mode=explicit
- --strict-readiness=false
- --model-load-thread-count={{ int .Values.triton.modelLoadThreads }}
- --exit-timeout-secs={{ int .Values.triton.exitTimeoutSeconds }}
- --http-address=127.0.0.1
- --grpc-address=127.0.0.1
- {{ ternary .Values.triton.metricsAddress "127.0.0.1" .Values.triton.exposeMetrics | printf "--metrics-address=%s" | quote }}
- --allow-sagemaker=false
{{- range .Values.triton.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Requests and limits, each including the GPUs, and the claims */}}
{{- define "triton-adapter.tritonResources" -}}
{{- $gpu := dict -}}
{{- if .Values.triton.gpu.count -}}
{{- $gpu = dict .Values.triton.gpu.resource (int .Values.triton.gpu.count) -}}
{{- end -}}
{{- $resources := dict -}}
{{- range $kind := list "requests" "limits" -}}
{{- with merge (deepCopy (get $.Values.triton.resources $kind | default dict)) $gpu -}}
{{- $_ := set $resources $kind . -}}
{{- end -}}
{{- end -}}
{{- $claims := list -}}
{{- range .Values.triton.resourceClaims -}}
{{- $claims = append $claims (dict "name" .name) -}}
{{- end -}}
{{- with $claims -}}
{{- $_ := set $resources "claims" . -}}
{{- end -}}
{{- with $resources }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* The user's env and envFrom, after the chart's: (list . container) */}}
{{- define "triton-adapter.extraEnv" -}}
{{- $root := index . 0 -}}
{{- with (index . 1).extraEnv -}}
{{- tpl (toYaml .) $root -}}
{{- end -}}
{{- end -}}

{{/* Variables of Triton's container. HOME is a folder that models can write to */}}
{{- define "triton-adapter.tritonEnv" -}}
{{- $given := list -}}
{{- range .Values.triton.extraEnv -}}
{{- $given = append $given .name -}}
{{- end -}}
{{- if not (has "HOME" $given) -}}
- {name: HOME, value: /tmp}
{{- end }}
{{ include "triton-adapter.allocatorEnv" . }}
{{ include "triton-adapter.extraEnv" (list . .Values.triton) }}
{{- end -}}

{{/* Has glibc return what models free, unless extraEnv chooses an allocator. With mode=single the adapter does it */}}
{{- define "triton-adapter.allocatorEnv" -}}
{{- $isChosen := false -}}
{{- range .Values.triton.extraEnv -}}
{{- $isChosen = or $isChosen (hasPrefix "MALLOC_" .name) (eq "LD_PRELOAD" .name) -}}
{{- end -}}
{{- if not (or $isChosen (include "triton-adapter.isSingle" .)) -}}
- {name: MALLOC_MMAP_THRESHOLD_, value: "2097152"}
- {name: MALLOC_TRIM_THRESHOLD_, value: "8388608"}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.mounts" -}}
- {name: repository, mountPath: /models/_triton_models}
- name: models
  mountPath: {{ .Values.models.mountPath | quote }}
  readOnly: true
  {{- with .Values.models.subPath }}
  subPath: {{ . | quote }}
  {{- end }}
{{- end -}}

{{- define "triton-adapter.tritonContainer" -}}
- name: triton
  image: {{ include "triton-adapter.image" (dict "root" . "image" .Values.triton.image) }}
  imagePullPolicy: {{ .Values.triton.image.pullPolicy }}
  {{- if .Values.triton.nativeSidecar }}
  restartPolicy: Always
  {{- end }}
  command:
    {{- toYaml .Values.triton.command | nindent 4 }}
  args:
    {{- include "triton-adapter.tritonArgs" . | nindent 4 }}
  env:
    {{- include "triton-adapter.tritonEnv" . | nindent 4 }}
  {{- with .Values.triton.extraEnvFrom }}
  envFrom:
    {{- tpl (toYaml .) $ | nindent 4 }}
  {{- end }}
  {{- if .Values.triton.exposeMetrics }}
  ports:
    - {name: triton-metrics, containerPort: 8002}
  {{- end }}
  # as a native sidecar: the adapter starts once this passes
  startupProbe:
    exec:
      command: {{ toJson .Values.triton.probeCommand }}
    periodSeconds: 5
    timeoutSeconds: 10
    failureThreshold: {{ div (add (int .Values.triton.startSeconds) 4) 5 }}
  livenessProbe:
    exec:
      command: {{ toJson .Values.triton.probeCommand }}
    {{- toYaml .Values.triton.livenessProbe | nindent 4 }}
  {{- if not .Values.triton.nativeSidecar }}
  # all containers get SIGTERM at once; the hook delays Triton's until the adapter has drained
  lifecycle:
    preStop:
      exec:
        command: [sleep, {{ include "triton-adapter.tritonPreStopSeconds" . | quote }}]
  {{- end }}
  {{- with include "triton-adapter.tritonResources" . }}
  resources:
    {{- . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.triton.securityContext | nindent 4 }}
  volumeMounts:
    {{- include "triton-adapter.mounts" . | nindent 4 }}
    {{- with include "triton-adapter.endpointMounts" (list . "triton") }}
    {{- . | nindent 4 }}
    {{- end }}
    - {name: triton-tmp, mountPath: /tmp}
    {{- if .Values.triton.shmSize }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
    {{- with .Values.triton.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The adapter, and with mode=single Triton in it */}}
{{- define "triton-adapter.adapterContainer" -}}
{{- $isSingle := include "triton-adapter.isSingle" . -}}
- name: adapter
  image: {{ include "triton-adapter.image" (dict "root" . "image" .Values.image) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    - serve
    {{- range .Values.adapter.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  {{- $env := include "triton-adapter.extraEnv" (list . .Values.adapter) }}
  {{- if or $isSingle $env }}
  env:
    {{- if $isSingle }}
    # the image's defaults are SageMaker's: one model and one port
    - {name: SAGEMAKER_MULTI_MODEL, value: "true"}
    - {name: SAGEMAKER_TRITON_ALLOW_GRPC, value: "true"}
    - {name: SAGEMAKER_TRITON_ALLOW_METRICS, value: "true"}
    {{- include "triton-adapter.tritonEnv" . | nindent 4 }}
    {{- end }}
    {{- with $env }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- end }}
  envFrom:
    - configMapRef: {name: {{ include "triton-adapter.fullname" . }}}
    {{- if $isSingle }}
    {{- with .Values.triton.extraEnvFrom }}
    {{- tpl (toYaml .) $ | nindent 4 }}
    {{- end }}
    {{- end }}
    {{- with .Values.endpoint.credentials.existingSecret }}
    - secretRef: {name: {{ tpl . $ }}}
    {{- end }}
    {{- with .Values.adapter.extraEnvFrom }}
    {{- tpl (toYaml .) $ | nindent 4 }}
    {{- end }}
  ports:
    {{- range $door, $name := dict "http" "http" "http_data" "http-data" "grpc" "grpc" "grpc_data" "grpc-data" "admin" "admin" "metrics" "metrics" }}
    {{- with include "triton-adapter.port" (list $ $door) }}
    - {name: {{ $name }}, containerPort: {{ . }}}
    {{- end }}
    {{- end }}
    {{- if and $isSingle .Values.triton.exposeMetrics }}
    - {name: triton-metrics, containerPort: 8002}
    {{- end }}
  {{- $probes := include "triton-adapter.probes" . }}
  {{- $start := include "triton-adapter.seconds" (list . "start_timeout_seconds" 120) | int }}
  {{- $load := include "triton-adapter.seconds" (list . "load_timeout_seconds" 350) | int }}
  {{- $period := int .Values.adapter.startupProbe.periodSeconds }}
  startupProbe:
    httpGet: {path: /startup, port: {{ $probes }}}
    periodSeconds: {{ $period }}
    # Triton may take start_timeout_seconds, and a single model load_timeout_seconds
    failureThreshold: {{ add 2 (div (add $start $load) $period) }}
  livenessProbe:
    httpGet: {path: /livez, port: {{ $probes }}}
    {{- toYaml .Values.adapter.livenessProbe | nindent 4 }}
  readinessProbe:
    httpGet: {path: /readyz, port: {{ $probes }}}
    {{- toYaml .Values.adapter.readinessProbe | nindent 4 }}
  {{- with .Values.adapter.preStop }}
  lifecycle:
    preStop:
      {{- toYaml . | nindent 6 }}
  {{- end }}
  {{- if $isSingle }}
  {{- with include "triton-adapter.tritonResources" . }}
  resources:
    {{- . | nindent 4 }}
  {{- end }}
  {{- else }}
  resources:
    {{- toYaml .Values.adapter.resources | nindent 4 }}
  {{- end }}
  securityContext:
    {{- ternary .Values.triton.securityContext .Values.adapter.securityContext (eq $isSingle "true") | toYaml | nindent 4 }}
  volumeMounts:
    {{- include "triton-adapter.mounts" . | nindent 4 }}
    {{- with include "triton-adapter.endpointMounts" (list . "adapter") }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- if $isSingle }}
    - {name: triton-tmp, mountPath: /tmp}
    {{- if .Values.triton.shmSize }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
    {{- with .Values.triton.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- else }}
    - {name: tmp, mountPath: /tmp}
    {{- end }}
    {{- with include "triton-adapter.tokenMount" . }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .Values.adapter.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "triton-adapter.tokenMount" -}}
{{- if .Values.adapter.controlToken.existingSecret -}}
- {name: control-token, mountPath: {{ include "triton-adapter.tokenFile" . | dir }}, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.tokenVolume" -}}
{{- with .Values.adapter.controlToken -}}
{{- if .existingSecret -}}
- name: control-token
  secret:
    secretName: {{ tpl .existingSecret $ }}
    items: [{key: {{ .key | quote }}, path: token}]
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.modelsVolume" -}}
{{- $models := .Values.models -}}
{{- if eq $models.type "emptyDir" -}}
emptyDir: {{ if $models.emptyDirSize }}{sizeLimit: {{ $models.emptyDirSize }}}{{ else }}{}{{ end }}
{{- else if eq $models.type "hostPath" -}}
hostPath: {path: {{ $models.hostPath | quote }}, type: Directory}
{{- else if eq $models.type "image" -}}
image:
  {{- toYaml (omit $models.image "imageVolumeGate") | nindent 2 }}
{{- else if eq $models.type "existingClaim" -}}
persistentVolumeClaim: {claimName: {{ $models.existingClaim }}}
{{- else if eq $models.type "ephemeral" -}}
ephemeral:
  volumeClaimTemplate:
    metadata:
      labels:
        {{- include "triton-adapter.labels" . | nindent 8 }}
    spec:
      {{- include "triton-adapter.claim" . | nindent 6 }}
{{- else -}}
persistentVolumeClaim: {claimName: {{ include "triton-adapter.fullname" . }}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.claim" -}}
accessModes:
  {{- toYaml .Values.models.pvc.accessModes | nindent 2 }}
{{- with .Values.models.pvc.storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .Values.models.pvc.size }}
{{- end -}}

{{- define "triton-adapter.volumes" -}}
- name: models
  {{- include "triton-adapter.modelsVolume" . | nindent 2 }}
- name: repository
  emptyDir: {{ if .Values.models.repositorySize }}{sizeLimit: {{ .Values.models.repositorySize }}}{{ else }}{}{{ end }}
{{- if not (include "triton-adapter.isSingle" .) }}
- name: tmp
  emptyDir: {sizeLimit: {{ .Values.adapter.tmpSize }}}
{{- end }}
{{- if not (include "triton-adapter.isElsewhere" .) }}
- name: triton-tmp
  emptyDir: {{ if .Values.triton.tmpSize }}{sizeLimit: {{ .Values.triton.tmpSize }}}{{ else }}{}{{ end }}
{{- if .Values.triton.shmSize }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.triton.shmSize }}}
{{- end }}
{{- end }}
{{- with include "triton-adapter.endpointVolumes" . }}
{{ . }}
{{- end }}
{{- with include "triton-adapter.tokenVolume" . }}
{{ . }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ tpl (toYaml .) $ }}
{{- end }}
{{- end -}}
