{{/* The Serve config: the same that `splitserve deploy` makes of the SplitServe config, cut up as cluster/config/parts.py
says, so that a change restarts only the deployments it concerns. */}}
{{- define "splitserve.serveConfig" -}}
{{- $scales := not (empty (dig "ingress" "autoscaling" nil .Values.config)) -}}
{{- range $pool := include "splitserve.pools" . | fromJsonArray -}}
{{- $scales = or $scales (not (empty (dig "pools" $pool "autoscaling" nil $.Values.config))) -}}
{{- end -}}
proxy_location: EveryNode
http_options:
  host: {{ dig "server" "host" "" .Values.config | quote }}
  port: {{ include "splitserve.port" . }}
logging_config:
  encoding: {{ eq (dig "logging" "format" "text" .Values.config) "json" | ternary "JSON" "TEXT" }}
  log_level: WARNING
  enable_access_log: false
applications:
  - name: splitserve
    route_prefix: /
    import_path: cluster.serving.serve_app:build
    {{- if $scales }}
    autoscaling_policy:
      policy_function: cluster.autoscaling.autoscaling_policy:decide
    {{- end }}
    args:
      config:
        {{- omit .Values.config "server" "auth" "cors" "ingress" "slo" "routing" "fairness" "limits" "tracing" "pools" "ray" | toYaml | nindent 8 }}
    deployments:
      {{- $ingress := dig "ingress" (dict) .Values.config }}
      - name: ingress
        {{- if $scales }}
        {{- $least := dig "replicas" 1 $ingress }}
        {{- $most := $least }}
        {{- if $ingress.autoscaling }}
        {{- $least = dig "min_replicas" 1 $ingress.autoscaling }}
        {{- $most = $ingress.autoscaling.max_replicas }}
        {{- end }}
        autoscaling_config:
          {{- include "splitserve.bounds" (dict "least" $least "most" $most "first" $least "where" "ingress") | nindent 10 }}
          metrics_interval_s: 1.0
          look_back_period_s: 10.0
        {{- else }}
        num_replicas: {{ dig "replicas" 1 $ingress }}
        {{- end }}
        user_config:
          pools:
            {{- toYaml .Values.config.pools | nindent 12 }}
          ingress:
            {{- pick $ingress "replicas" "autoscaling" "num_cpus" "num_gpus" "node_labels" | toYaml | nindent 12 }}
        {{- $own := pick .Values.config "server" "auth" "cors" "slo" "routing" "fairness" "limits" "tracing" }}
        {{- with include "splitserve.ownKeys" $ingress | fromJson }}
        {{- $own = set $own "ingress" . }}
        {{- end }}
        {{- include "splitserve.actorOptions" (dict "of" $ingress "own" ($own | toJson)) | nindent 8 }}
      {{- range $name := include "splitserve.pools" . | fromJsonArray }}
      {{- $pool := include "splitserve.pool" (dict "root" $ "pool" $name) | fromJson }}
      - name: {{ $name }}
        {{- with $pool.autoscaling }}
        {{- $least := dig "min_replicas" 1 . }}
        autoscaling_config:
          {{- include "splitserve.bounds" (dict "least" $least "most" .max_replicas "first" (dig "initial_replicas" $least .) "where" (printf "pools.%s" $name)) | nindent 10 }}
        {{- else }}
        num_replicas: {{ dig "replicas" 1 $pool }}
        {{- end }}
        {{- include "splitserve.actorOptions" (dict "of" $pool "own" (include "splitserve.ownKeys" $pool) "num_gpus" (dig "num_gpus" 0 $pool)) | nindent 8 }}
      {{- end }}
{{- end -}}

{{/* What of a pool or the ingress is no option of its deployment, as JSON. */}}
{{- define "splitserve.ownKeys" -}}
{{- omit . "replicas" "autoscaling" "num_cpus" "num_gpus" "node_labels" | toJson -}}
{{- end -}}

{{/* The delays are our policy's, not Serve's. */}}
{{- define "splitserve.bounds" -}}
min_replicas: {{ .least }}
max_replicas: {{ required (printf "config.%s.autoscaling.max_replicas: missing" .where) .most }}
initial_replicas: {{ .first }}
upscale_delay_s: 0.0
downscale_delay_s: 0.0
downscale_to_zero_delay_s: 0.0
{{- end -}}

{{/* A change of these restarts the replicas of this deployment only. */}}
{{- define "splitserve.actorOptions" -}}
ray_actor_options:
  num_cpus: {{ dig "num_cpus" 1 .of }}
  {{- if hasKey . "num_gpus" }}
  num_gpus: {{ .num_gpus }}
  {{- end }}
  {{- with .of.node_labels }}
  label_selector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  runtime_env:
    env_vars:
      SPLITSERVE_DEPLOYMENT_CONFIG: {{ .own | quote }}
{{- end -}}
