{{/* Rules over several keys, which values.schema.json cannot express. Each text begins with the key */}}
{{- define "triton-adapter.validate" -}}
{{- include "triton-adapter.validateMode" . -}}
{{- include "triton-adapter.validateApis" . -}}
{{- include "triton-adapter.validateAlerts" . -}}
{{- if include "triton-adapter.isPod" . -}}
{{- include "triton-adapter.validateTriton" . -}}
{{- include "triton-adapter.validateDoors" . -}}
{{- include "triton-adapter.validateStopping" . -}}
{{- include "triton-adapter.validateModels" . -}}
{{- include "triton-adapter.validateEndpoint" . -}}
{{- include "triton-adapter.validateScaling" . -}}
{{- include "triton-adapter.validateFleet" . -}}
{{- if .Values.podSpec -}}
{{- include "triton-adapter.validatePodSpec" . -}}
{{- end -}}
{{- else -}}
{{- include "triton-adapter.validateRuntime" . -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateMode" -}}
{{- if not (include "triton-adapter.isPod" .) -}}
{{- range $key, $on := dict
  "fleet.enabled" .Values.fleet.enabled
  "pdb.enabled" .Values.pdb.enabled
  "autoscaling.hpa.enabled" .Values.autoscaling.hpa.enabled
  "autoscaling.keda.enabled" .Values.autoscaling.keda.enabled
  "metrics.serviceMonitor.enabled" .Values.metrics.serviceMonitor.enabled
  "networkPolicy.management" .Values.networkPolicy.management
  "networkPolicy.inference" .Values.networkPolicy.inference
  "networkPolicy.monitoring" .Values.networkPolicy.monitoring
  "networkPolicy.extraIngress" .Values.networkPolicy.extraIngress
  "networkPolicy.egress" (not (kindIs "invalid" .Values.networkPolicy.egress))
  "models.load" .Values.models.load
  "settings.model_store" .Values.settings.model_store
  "settings.endpoints" .Values.settings.endpoints
  "podSpec" .Values.podSpec
  "triton.resourceClaims" .Values.triton.resourceClaims
  "adapter.controlToken.existingSecret" .Values.adapter.controlToken.existingSecret
  "extraContainers" .Values.extraContainers
  "extraInitContainers" .Values.extraInitContainers -}}
{{- if $on -}}
{{- fail (printf "%s: needs mode=pod or mode=single; ModelMesh's controller makes the pods of a ServingRuntime" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.triton.enabled) (ne .Values.mode "pod") -}}
{{- fail "triton.enabled: false needs mode=pod" -}}
{{- end -}}
{{- if and (include "triton-adapter.isNative" .) (semverCompare "<1.29.0-0" .Capabilities.KubeVersion.Version) -}}
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
  "fleet.enabled" (list .Values.fleet.enabled (list "gateway.envoyproxy.io/v1alpha1" "Envoy Gateway"))
  "autoscaling.keda.enabled" (list .Values.autoscaling.keda.enabled (list "keda.sh/v1alpha1" "KEDA"))
  "mode=servingRuntime" (list (eq .Values.mode "servingRuntime") (list "serving.kserve.io/v1alpha1" "ModelMesh")) -}}
{{- $api := index $wanted 1 -}}
{{- if and (index $wanted 0) (not ($.Capabilities.APIVersions.Has (index $api 0))) -}}
{{- fail (printf "%s: the cluster has no %s; install %s first, or set checkApis=false to render without a cluster" $key (index $api 0) (index $api 1)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateAlerts" -}}
{{- $alerts := $.Files.Get "files/alerts.yaml" -}}
{{- $rule := .Values.metrics.prometheusRule -}}
{{- range $rule.disabled -}}
{{- if not (contains (printf "alert: %s\n" .) $alerts) -}}
{{- fail (printf "metrics.prometheusRule.disabled: files/alerts.yaml has no alert %s" .) -}}
{{- end -}}
{{- end -}}
{{- range $alert, $_ := $rule.severities -}}
{{- if not (contains (printf "alert: %s\n" $alert) $alerts) -}}
{{- fail (printf "metrics.prometheusRule.severities: files/alerts.yaml has no alert %s" $alert) -}}
{{- end -}}
{{- end -}}
{{- range $alert, $_ := $rule.thresholds -}}
{{- if not (regexMatch (printf "(?s)alert: %s\n([^\n]|\n[^\n])*# threshold" $alert) $alerts) -}}
{{- fail (printf "metrics.prometheusRule.thresholds: files/alerts.yaml has no alert %s with a threshold" $alert) -}}
{{- end -}}
{{- end -}}
{{- if not (include "triton-adapter.isPod" .) -}}
{{- $listener := include "triton-adapter.probes" . -}}
{{- $door := get (fromYaml (include "triton-adapter.settings" .)) $listener | toString -}}
{{- $isClosed := regexMatch "^(127\\.|localhost:|\\[::1\\]:)" $door -}}
{{- if and .Values.metrics.podMonitor.enabled (or $isClosed (ne $listener "metrics")) -}}
{{- fail "metrics.podMonitor.enabled: settings.metrics must be reachable from outside the pod, such as [::]:8082" -}}
{{- end -}}
{{- if and $rule.enabled $isClosed -}}
{{- fail (printf "metrics.prometheusRule.enabled: with mode=servingRuntime nothing scrapes %s; set metrics.podMonitor.enabled" $door) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateTriton" -}}
{{- if include "triton-adapter.isElsewhere" . -}}
{{- if not .Values.triton.address -}}
{{- fail "triton.address: triton.enabled=false needs Triton's host" -}}
{{- end -}}
{{- range $key, $given := dict
  "triton.exposeMetrics" .Values.triton.exposeMetrics
  "triton.extraArgs" .Values.triton.extraArgs
  "triton.extraEnv" .Values.triton.extraEnv
  "triton.extraEnvFrom" .Values.triton.extraEnvFrom
  "triton.extraVolumeMounts" .Values.triton.extraVolumeMounts
  "triton.resourceClaims" .Values.triton.resourceClaims -}}
{{- if $given -}}
{{- fail (printf "%s: needs a Triton in the pod, but triton.enabled=false" $key) -}}
{{- end -}}
{{- end -}}
{{- if ne (.Values.settings.staging | default "upload") "upload" -}}
{{- fail (printf "settings.staging: %s needs a repository shared with Triton, but triton.enabled=false; use upload" .Values.settings.staging) -}}
{{- end -}}
{{- $scaled := or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}
{{- if or $scaled (gt (int .Values.replicaCount) 1) -}}
{{- fail (printf "%s: a Triton takes one adapter, but all pods would share the one at triton.address" (ternary "autoscaling" "replicaCount" $scaled)) -}}
{{- end -}}
{{- else -}}
{{- if .Values.triton.address -}}
{{- fail "triton.address: needs triton.enabled=false; here Triton runs in the pod" -}}
{{- end -}}
{{- end -}}
{{- if include "triton-adapter.isSingle" . -}}
{{- if .Values.settings.staging -}}
{{- if eq .Values.settings.staging "upload" -}}
{{- fail "settings.staging: upload is for an external Triton; mode=single has its own" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.triton.exposeMetrics (ne .Values.triton.metricsAddress "0.0.0.0") -}}
{{- fail "triton.metricsAddress: mode=single allows 0.0.0.0 only" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateDoors" -}}
{{- $settings := fromYaml (include "triton-adapter.settings" .) -}}
{{- if regexMatch "^(127\\.|localhost$|::1$)" (toString $settings.listen_host) -}}
{{- fail (printf "settings.listen_host: %s cannot be reached from outside the pod; use :: or 0.0.0.0" $settings.listen_host) -}}
{{- end -}}
{{- $probes := include "triton-adapter.probes" . -}}
{{- if not (include "triton-adapter.port" (list . $probes)) -}}
{{- fail "settings.admin: must be HOST:PORT with mode=pod and settings.metrics=off, as kubelet probes it" -}}
{{- end -}}
{{- range $name := list "http" "http_data" "grpc" "grpc_data" "admin" "metrics" -}}
{{- $door := get $settings $name | toString -}}
{{- if regexMatch "^(127\\.|localhost:|\\[::1\\]:)" $door -}}
{{- fail (printf "settings.%s: %s cannot be reached from outside the pod; use [::]:PORT or off" $name $door) -}}
{{- end -}}
{{- end -}}
{{- $any := 0 -}}
{{- range $name, $key := dict "http" "http" "http_data" "httpData" "grpc" "grpc" "grpc_data" "grpcData" "admin" "admin" "metrics" "metrics" -}}
{{- $any = add $any (get $.Values.service $key) -}}
{{- if and (get $.Values.service $key) (not (include "triton-adapter.port" (list $ $name))) -}}
{{- fail (printf "service.%s: settings.%s is off or a socket; set this port to 0" $key $name) -}}
{{- end -}}
{{- end -}}
{{- if not $any -}}
{{- fail "service: at least one of http, httpData, grpc, grpcData, admin and metrics must have a port" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.inference (not (or (include "triton-adapter.port" (list . "http_data")) (include "triton-adapter.port" (list . "grpc_data")))) -}}
{{- fail "networkPolicy.inference: needs settings.http_data or settings.grpc_data, which are off or sockets" -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled .Values.metrics.podMonitor.enabled -}}
{{- fail "metrics.serviceMonitor.enabled: metrics.podMonitor.enabled scrapes the same pods; enable one of them" -}}
{{- end -}}
{{- if and .Values.service.externalTrafficPolicy (eq .Values.service.type "ClusterIP") -}}
{{- fail "service.externalTrafficPolicy: needs service.type NodePort or LoadBalancer" -}}
{{- end -}}
{{- if and .Values.service.loadBalancerSourceRanges (ne .Values.service.type "LoadBalancer") -}}
{{- fail "service.loadBalancerSourceRanges: needs service.type=LoadBalancer" -}}
{{- end -}}
{{- range .Values.adapter.extraEnv -}}
{{- if has .name (list "ADAPTER_HTTP" "ADAPTER_HTTP_DATA" "ADAPTER_GRPC" "ADAPTER_GRPC_DATA" "ADAPTER_ADMIN" "ADAPTER_METRICS" "ADAPTER_LISTEN_HOST" "ADAPTER_MODEL_ROOTS" "ADAPTER_REPOSITORY" "ADAPTER_STAGING" "ADAPTER_TRITON" "ADAPTER_TRITON_HTTP" "ADAPTER_TRITON_GRPC" "ADAPTER_TRITON_METRICS" "ADAPTER_START_TIMEOUT_SECONDS" "ADAPTER_LOAD_TIMEOUT_SECONDS" "ADAPTER_DRAIN_TIMEOUT_SECONDS" "ADAPTER_DRAIN_MIN_SECONDS" "ADAPTER_MODEL_STORE" "ADAPTER_ENDPOINTS" "ADAPTER_ENDPOINT_KEYS" "ADAPTER_CACHE_DIR" "ADAPTER_CACHE_LIMIT") -}}
{{- fail (printf "adapter.extraEnv: %s would override what the chart derives ports, probes, volumes and the grace period from; set it under settings" .name) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled (not (get .Values.service $probes)) -}}
{{- fail (printf "metrics.serviceMonitor.enabled: needs service.%s; or use metrics.podMonitor" $probes) -}}
{{- end -}}
{{- if and .Values.networkPolicy.egress (not .Values.networkPolicy.enabled) -}}
{{- fail "networkPolicy.egress: needs networkPolicy.enabled=true" -}}
{{- end -}}
{{- if and .Values.service.clusterIP (ne .Values.service.type "ClusterIP") -}}
{{- fail "service.clusterIP: None needs service.type=ClusterIP" -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateStopping" -}}
{{- if and .Values.adapter.preStop (not .Values.adapter.preStopSeconds) -}}
{{- fail "adapter.preStopSeconds: required with adapter.preStop, as the grace period includes it" -}}
{{- end -}}
{{- $settings := fromYaml (include "triton-adapter.settings" .) -}}
{{- if gt (float64 $settings.drain_min_seconds) (float64 ($settings.drain_timeout_seconds | default 18)) -}}
{{- fail "settings.drain_min_seconds: must not exceed settings.drain_timeout_seconds" -}}
{{- end -}}
{{- $least := include "triton-adapter.leastGraceSeconds" . | int -}}
{{- $given := include "triton-adapter.graceSeconds" . | int -}}
{{- if lt $given $least -}}
{{- fail (printf "terminationGracePeriodSeconds: %d is too short; the adapter's drain and Triton's exit may take %d" $given $least) -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateModels" -}}
{{- $limit := get (fromYaml (include "triton-adapter.settings" .)) "memory_limit" -}}
{{- if and (include "triton-adapter.hasTriton" .) (not (include "triton-adapter.hasGpu" .)) (not $limit) -}}
{{- fail "settings.memory_limit: required without a GPU, unless triton.resources.limits.memory is set" -}}
{{- end -}}
{{- if and (kindIs "string" $limit) (hasPrefix "-" $limit) -}}
{{- fail "triton.shmSize: must not exceed triton.resources.limits.memory, which includes it" -}}
{{- end -}}
{{- $container := dig "limits" "memory" "" (.Values.triton.resources | default dict) -}}
{{- if and $container .Values.settings.memory_limit (not (include "triton-adapter.hasGpu" .)) (not (include "triton-adapter.isElsewhere" .)) -}}
{{- $limit = include "triton-adapter.settingText" (list "memory_limit" .Values.settings.memory_limit) -}}
{{- if gt (include "triton-adapter.bytes" (list "settings.memory_limit" (include "triton-adapter.quantity" $limit)) | int64) (include "triton-adapter.bytes" (list "triton.resources.limits.memory" $container) | int64) -}}
{{- fail (printf "settings.memory_limit: %s exceeds triton.resources.limits.memory, %s, at which the kernel kills Triton; remove it, or raise that limit" $limit ($container | toString)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.models.load .Values.settings.load_at_start -}}
{{- fail "models.load: settings.load_at_start is set too; set one of them" -}}
{{- end -}}
{{- if and .Values.triton.resourceClaims .Values.triton.gpu.count -}}
{{- fail "triton.gpu.count: must be 0 with triton.resourceClaims, which provide the GPUs" -}}
{{- end -}}
{{- if and .Values.triton.resourceClaims (semverCompare "<1.31.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "triton.resourceClaims: needs Kubernetes 1.31, this is %s" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if eq .Values.models.type "image" -}}
{{- if not .Values.models.image.reference -}}
{{- fail "models.image.reference: models.type=image needs an image" -}}
{{- end -}}
{{- if semverCompare "<1.31.0-0" .Capabilities.KubeVersion.Version -}}
{{- fail (printf "models.type: image needs Kubernetes 1.31, this is %s" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and (not .Values.models.image.imageVolumeGate) (semverCompare "<1.35.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "models.type: image on Kubernetes %s needs the feature gate ImageVolume, else the API server drops the volume without an error; set models.image.imageVolumeGate=true if the cluster has it on" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and .Values.models.subPath (semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "models.subPath: with models.type=image needs Kubernetes 1.33, this is %s" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- with .Values.models -}}
{{- if and (eq .type "existingClaim") (not .existingClaim) -}}
{{- fail "models.existingClaim: models.type=existingClaim needs a claim" -}}
{{- end -}}
{{- if and (eq .type "hostPath") (not .hostPath) -}}
{{- fail "models.hostPath: models.type=hostPath needs a folder on the node" -}}
{{- end -}}
{{- if or (eq .mountPath "/models") (hasPrefix "/models/_triton_models" .mountPath) -}}
{{- fail (printf "models.mountPath: %s overlaps Triton's repository, /models/_triton_models" .mountPath) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateScaling" -}}
{{- $hpa := .Values.autoscaling.hpa -}}
{{- $keda := .Values.autoscaling.keda -}}
{{- if and $hpa.enabled $keda.enabled -}}
{{- fail "autoscaling: hpa.enabled and keda.enabled are both true; enable one of them" -}}
{{- end -}}
{{- if and $hpa.enabled (not (or $hpa.requestsInFlight $hpa.cpuPercent $hpa.evictionsPerSecond $hpa.noRoomPerSecond $hpa.metrics)) -}}
{{- fail "autoscaling.hpa: needs requestsInFlight, cpuPercent, evictionsPerSecond, noRoomPerSecond or metrics" -}}
{{- end -}}
{{- if and $keda.enabled (not $keda.serverAddress) -}}
{{- fail "autoscaling.keda.serverAddress: needs the URL of Prometheus" -}}
{{- end -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) -}}
{{- fail "autoscaling.minReplicas: must not exceed autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and (or $hpa.enabled $keda.enabled) (not (or .Values.settings.single_model .Values.settings.load_at_start .Values.models.load (include "triton-adapter.hasStore" .))) -}}
{{- fail "autoscaling: a new pod would have no model; set models.load, settings.single_model or settings.model_store" -}}
{{- end -}}
{{- if and $keda.enabled (not .Values.autoscaling.minReplicas) (not $keda.triggers) -}}
{{- fail "autoscaling.minReplicas: with 0 nothing starts pods again, as the query counts requests in pods; add another kind of trigger to autoscaling.keda.triggers" -}}
{{- end -}}
{{- $most := ternary .Values.autoscaling.maxReplicas .Values.replicaCount (or $hpa.enabled $keda.enabled) | int -}}
{{- if and (gt $most 1) (include "triton-adapter.isClaimOfOneNode" .) -}}
{{- fail (printf "models.pvc.accessModes: %d pods may run on several nodes and need ReadOnlyMany or ReadWriteMany; or use models.type=ephemeral, a claim per pod" $most) -}}
{{- end -}}
{{- if and $hpa.enabled (not .Values.autoscaling.minReplicas) -}}
{{- fail "autoscaling.minReplicas: 0 needs autoscaling.keda" -}}
{{- end -}}
{{- if and .Values.pdb.enabled (not (kindIs "invalid" .Values.pdb.minAvailable)) (not (kindIs "invalid" .Values.pdb.maxUnavailable)) -}}
{{- fail "pdb: minAvailable and maxUnavailable are both set; set one of them" -}}
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateRuntime" -}}
{{- $name := include "triton-adapter.meshName" . -}}
{{- if gt (len $name) 63 -}}
{{- fail (printf "fullnameOverride: %s exceeds 63 characters, the limit of a label, and ModelMesh's controller uses it as one; shorten it" $name) -}}
{{- end -}}
{{- $settings := fromYaml (include "triton-adapter.settings" .) -}}
{{- if not (or (hasPrefix "unix:" ($settings.grpc | toString)) (include "triton-adapter.port" (list . "grpc"))) -}}
{{- fail "settings.grpc: cannot be off with mode=servingRuntime: ModelMesh calls it" -}}
{{- end -}}
{{- if not (include "triton-adapter.port" (list . (include "triton-adapter.probes" .))) -}}
{{- fail "settings.admin: must be HOST:PORT with mode=servingRuntime and settings.metrics=off: the livenessProbe asks it" -}}
{{- end -}}
{{- range $name := list "http" "http_data" "grpc" "grpc_data" "admin" "metrics" -}}
{{- $port := include "triton-adapter.port" (list $ $name) -}}
{{- if and (has $port (list "8008" "8080" "8085" "8086" "8089" "8090")) (ne (print $name $port) "grpc8085") -}}
{{- fail (printf "settings.%s: port %s belongs to a container that ModelMesh's controller adds; choose another port" $name $port) -}}
{{- end -}}
{{- end -}}
{{- if not (dig "requests" "memory" "" .Values.triton.resources) -}}
{{- fail "triton.resources.requests.memory: required with mode=servingRuntime, which reports it to ModelMesh as Triton's memory" -}}
{{- end -}}
{{- end -}}
