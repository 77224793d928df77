{{/* Rules that take more than one key, which values.schema.json cannot say. Each text begins with the key */}}
{{- define "triton-adapter.validate" -}}
{{- include "triton-adapter.validateMode" . -}}
{{- include "triton-adapter.validateApis" . -}}
{{- if include "triton-adapter.isPod" . -}}
{{- include "triton-adapter.validateDoors" . -}}
{{- include "triton-adapter.validateStopping" . -}}
{{- include "triton-adapter.validateModels" . -}}
{{- include "triton-adapter.validateScaling" . -}}
{{- else -}}
{{- include "triton-adapter.validateRuntime" . -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateMode" -}}
{{- if not (include "triton-adapter.isPod" .) -}}
{{- range $key, $on := dict
  "pdb.enabled" .Values.pdb.enabled
  "autoscaling.hpa.enabled" .Values.autoscaling.hpa.enabled
  "autoscaling.keda.enabled" .Values.autoscaling.keda.enabled
  "metrics.podMonitor.enabled" .Values.metrics.podMonitor.enabled
  "metrics.serviceMonitor.enabled" .Values.metrics.serviceMonitor.enabled
  "networkPolicy.enabled" .Values.networkPolicy.enabled
  "extraContainers" .Values.extraContainers
  "extraInitContainers" .Values.extraInitContainers -}}
{{- if $on -}}
{{- fail (printf "%s: needs mode=pod: the pods of a ServingRuntime are made by ModelMesh's controller" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (include "triton-adapter.isPod" .) .Values.triton.nativeSidecar (semverCompare "<1.29.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "triton.nativeSidecar: needs Kubernetes 1.29, this is %s; set it to false" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateApis" -}}
{{- if .Values.checkApis -}}
{{- $monitoring := list "monitoring.coreos.com/v1" "Prometheus operator" -}}
{{- range $key, $wanted := dict
  "metrics.podMonitor.enabled" (list .Values.metrics.podMonitor.enabled $monitoring)
  "metrics.serviceMonitor.enabled" (list .Values.metrics.serviceMonitor.enabled $monitoring)
  "metrics.prometheusRule.enabled" (list .Values.metrics.prometheusRule.enabled $monitoring)
  "autoscaling.keda.enabled" (list .Values.autoscaling.keda.enabled (list "keda.sh/v1alpha1" "KEDA"))
  "mode=servingRuntime" (list (eq .Values.mode "servingRuntime") (list "serving.kserve.io/v1alpha1" "ModelMesh")) -}}
{{- $api := index $wanted 1 -}}
{{- if and (index $wanted 0) (not ($.Capabilities.APIVersions.Has (index $api 0))) -}}
{{- fail (printf "%s: the cluster does not know %s: install %s first, or set checkApis=false to render without a cluster" $key (index $api 0) (index $api 1)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateDoors" -}}
{{- $settings := fromYaml (include "triton-adapter.settings" .) -}}
{{- if not (include "triton-adapter.port" (list . "admin")) -}}
{{- fail "settings.admin: must be HOST:PORT with mode=pod: kubelet probes it" -}}
{{- end -}}
{{- range $name := list "http" "grpc" "grpc_data" "admin" -}}
{{- $door := get $settings $name | toString -}}
{{- if regexMatch "^(127\\.|localhost:|\\[::1\\]:)" $door -}}
{{- fail (printf "settings.%s: %s cannot be reached from outside the pod; write 0.0.0.0:PORT, [::]:PORT or off" $name $door) -}}
{{- end -}}
{{- end -}}
{{- $any := 0 -}}
{{- range $name, $key := dict "http" "http" "grpc" "grpc" "grpc_data" "grpcData" "admin" "admin" -}}
{{- $any = add $any (get $.Values.service $key) -}}
{{- if and (get $.Values.service $key) (not (include "triton-adapter.port" (list $ $name))) -}}
{{- fail (printf "service.%s: the listener settings.%s is off or a socket; set the port to 0" $key $name) -}}
{{- end -}}
{{- end -}}
{{- if not $any -}}
{{- fail "service: at least one of http, grpc, grpcData and admin must have a port" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.inference (not (include "triton-adapter.port" (list . "grpc_data"))) -}}
{{- fail "networkPolicy.inference: is about the port of settings.grpc_data, which is off or a socket" -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.service.admin) -}}
{{- fail "metrics.serviceMonitor.enabled: needs service.admin, or take metrics.podMonitor" -}}
{{- end -}}
{{- if and .Values.service.clusterIP (ne .Values.service.type "ClusterIP") -}}
{{- fail "service.clusterIP: None needs service.type=ClusterIP" -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateStopping" -}}
{{- if and .Values.adapter.preStop (not .Values.adapter.preStopSeconds) -}}
{{- fail "adapter.preStopSeconds: say how long adapter.preStop may take: the grace period counts it" -}}
{{- end -}}
{{- $settings := fromYaml (include "triton-adapter.settings" .) -}}
{{- if gt (float64 $settings.drain_min_seconds) (float64 ($settings.drain_timeout_seconds | default 18)) -}}
{{- fail "settings.drain_min_seconds: is more than settings.drain_timeout_seconds, of which it is a part" -}}
{{- end -}}
{{- $least := include "triton-adapter.leastGraceSeconds" . | int -}}
{{- $given := include "triton-adapter.graceSeconds" . | int -}}
{{- if lt $given $least -}}
{{- fail (printf "terminationGracePeriodSeconds: %d is too short: the drain of the adapter and the end of Triton may take %d" $given $least) -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateModels" -}}
{{- with .Values.models -}}
{{- if and (eq .type "existingClaim") (not .existingClaim) -}}
{{- fail "models.existingClaim: models.type=existingClaim needs the name of a claim" -}}
{{- end -}}
{{- if and (eq .type "hostPath") (not .hostPath) -}}
{{- fail "models.hostPath: models.type=hostPath needs a folder of the node" -}}
{{- end -}}
{{- if or (eq .mountPath "/models") (hasPrefix "/models/_triton_models" .mountPath) -}}
{{- fail (printf "models.mountPath: %s holds or is in Triton's repository, /models/_triton_models" .mountPath) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateScaling" -}}
{{- $hpa := .Values.autoscaling.hpa -}}
{{- $keda := .Values.autoscaling.keda -}}
{{- if and $hpa.enabled $keda.enabled -}}
{{- fail "autoscaling: hpa.enabled and keda.enabled cannot both be true" -}}
{{- end -}}
{{- if and $hpa.enabled (not (or $hpa.requestsInFlight $hpa.cpuPercent $hpa.metrics)) -}}
{{- fail "autoscaling.hpa: needs requestsInFlight, cpuPercent or metrics" -}}
{{- end -}}
{{- if and $keda.enabled (not $keda.serverAddress) -}}
{{- fail "autoscaling.keda.serverAddress: the URL of Prometheus is missing" -}}
{{- end -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) -}}
{{- fail "autoscaling.minReplicas: is more than autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and $hpa.enabled (not .Values.autoscaling.minReplicas) -}}
{{- fail "autoscaling.minReplicas: 0 needs autoscaling.keda" -}}
{{- end -}}
{{- if and .Values.pdb.enabled (not (kindIs "invalid" .Values.pdb.minAvailable)) (not (kindIs "invalid" .Values.pdb.maxUnavailable)) -}}
{{- fail "pdb: minAvailable and maxUnavailable cannot both be given" -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateRuntime" -}}
{{- $settings := fromYaml (include "triton-adapter.settings" .) -}}
{{- if not (or (hasPrefix "unix:" ($settings.grpc | toString)) (include "triton-adapter.port" (list . "grpc"))) -}}
{{- fail "settings.grpc: cannot be off with mode=servingRuntime: ModelMesh calls it" -}}
{{- end -}}
{{- if not (include "triton-adapter.port" (list . "admin")) -}}
{{- fail "settings.admin: must be HOST:PORT with mode=servingRuntime: the livenessProbe asks it" -}}
{{- end -}}
{{- range $name := list "http" "grpc" "grpc_data" "admin" -}}
{{- $port := include "triton-adapter.port" (list $ $name) -}}
{{- if and (has $port (list "8008" "8080" "8085" "8086" "8089" "8090")) (ne (print $name $port) "grpc8085") -}}
{{- fail (printf "settings.%s: port %s is taken by what the controller of ModelMesh puts into the pod" $name $port) -}}
{{- end -}}
{{- end -}}
{{- if not (dig "requests" "memory" "" .Values.triton.resources) -}}
{{- fail "triton.resources.requests.memory: is what ModelMesh is told of the memory of Triton; mode=servingRuntime needs it" -}}
{{- end -}}
{{- end -}}
