{{/* Names and labels. */}}

{{- define "splitserve.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 47 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 47 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What pods are selected by: nothing here may change between chart versions. */}}
{{- define "splitserve.selectorLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
splitserve.io/service: {{ include "splitserve.fullname" . }}
{{- end -}}

{{/* Labels of objects other than pods. The chart's version must not get into pod templates: it would replace the cluster. */}}
{{- define "splitserve.labels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
{{ include "splitserve.selectorLabels" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "splitserve.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "splitserve.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "splitserve.cacheClaim" -}}
{{- default (printf "%s-models" (include "splitserve.fullname" .)) .Values.modelCache.existingClaim -}}
{{- end -}}

{{- define "splitserve.port" -}}
{{- dig "server" "port" 8000 .Values.config | int -}}
{{- end -}}
