{{/* The Serve config: the same that `splitserve deploy` makes of the SplitServe config. */}}
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
    import_path: cluster.serve_app:build
    {{- if $scales }}
    autoscaling_policy:
      policy_function: cluster.autoscaling_policy:decide
    {{- end }}
    args:
      config:
        {{- toYaml .Values.config | nindent 8 }}
{{- end -}}
