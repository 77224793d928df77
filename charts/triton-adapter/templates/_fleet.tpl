{{/* The Service's port for calls over HTTP, and over gRPC: that of the inference-only listener, if enabled. 0: none */}}
{{- define "triton-adapter.fleetHttp" -}}
{{- .Values.service.httpData | default .Values.service.http | int -}}
{{- end -}}

{{- define "triton-adapter.fleetGrpc" -}}
{{- .Values.service.grpcData | default .Values.service.grpc | int -}}
{{- end -}}

{{/* Routes by the Gateway's listeners */}}
{{- define "triton-adapter.fleetRoutes" -}}
{{- if include "triton-adapter.fleetHttp" . | int }}
http: HTTPRoute
{{- end }}
{{- if include "triton-adapter.fleetGrpc" . | int }}
grpc: GRPCRoute
{{- end }}
{{- end -}}

{{/* The adapter's listeners that the Gateway's Envoys call */}}
{{- define "triton-adapter.fleetListeners" -}}
{{- with .Values.service -}}
{{- if .httpData }}
- http_data
{{- else if .http }}
- http
{{- end }}
{{- if .grpcData }}
- grpc_data
{{- else if .grpc }}
- grpc
{{- end }}
{{- end }}
- {{ include "triton-adapter.probes" . }}
{{- end -}}

{{/* Whether the lack of memory decides the number of replicas: (list values-of-hpa-or-keda) */}}
{{- define "triton-adapter.scalesByMemory" -}}
{{- $scaler := index . 0 -}}
{{- if and $scaler.enabled (or $scaler.evictionsPerSecond $scaler.noRoomPerSecond) }}true{{ end -}}
{{- end -}}

{{/* A new pod changes the figures only once it has loaded its share of the models. When nothing is evicted, there are
     enough pods, but maybe not one too many: so scaling down is slow */}}
{{- define "triton-adapter.scalingBehavior" -}}
{{- $scaler := index . 0 -}}
{{- if $scaler.behavior -}}
{{- toYaml $scaler.behavior -}}
{{- else if include "triton-adapter.scalesByMemory" (list $scaler) -}}
scaleUp:
  policies: [{type: Pods, value: 1, periodSeconds: 300}]
scaleDown:
  stabilizationWindowSeconds: 3600
  policies: [{type: Pods, value: 1, periodSeconds: 1800}]
{{- end -}}
{{- end -}}

{{- define "triton-adapter.validateFleet" -}}
{{- if .Values.fleet.enabled -}}
{{- if not (include "triton-adapter.hasStore" .) -}}
{{- fail "fleet.enabled: every pod must be able to fetch every model; set settings.model_store or settings.endpoints" -}}
{{- end -}}
{{- if not (or (include "triton-adapter.fleetHttp" . | int) (include "triton-adapter.fleetGrpc" . | int)) -}}
{{- fail "fleet.enabled: the Gateway needs a port of the Service; set service.httpData, service.http, service.grpcData or service.grpc" -}}
{{- end -}}
{{- else if .Values.fleet.patch -}}
{{- fail "fleet.patch: needs fleet.enabled=true" -}}
{{- end -}}
{{- range $name := list "hpa" "keda" -}}
{{- $scaler := get $.Values.autoscaling $name -}}
{{- if and (include "triton-adapter.scalesByMemory" (list $scaler)) (not (include "triton-adapter.hasStore" $)) -}}
{{- fail (printf "autoscaling.%s: evictionsPerSecond and noRoomPerSecond need a store; set settings.model_store" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
