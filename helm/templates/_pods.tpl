{{/* Pod templates. Only what decides how a pod runs may be in here: any change makes a new Ray cluster. */}}

{{- define "splitserve.image" -}}
{{- printf "%s:%s" .Values.image.repository .Values.image.tag -}}
{{- end -}}

{{/* Environment of every Ray container. Takes root and env, the pod's own. */}}
{{- define "splitserve.env" -}}
{{- $values := .root.Values -}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: NIXL_LOG_LEVEL, value: WARN}
- {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: "cluster.http.proxy_headers:middlewares"}
{{- /* As cluster/serving/serve_command.py: a proxy that has died is replaced after three checks, of 10 s each by Serve's default. */}}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: "2"}
{{- /* As cluster/http/serve_proxy.py. The image has a launcher of HAProxy. */}}
{{- if eq (include "splitserve.proxy" .root) "haproxy" }}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD, value: "0"}
- {name: RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP, value: "0"}
{{- end }}
{{- with $values.huggingface.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $values.huggingface.key }}}}
{{- end }}
{{- with $values.apiKey.existingSecret }}
- name: {{ $values.config.auth.api_keys_env }}
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $values.apiKey.key }}}}
{{- end }}
{{- with concat $values.env .env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "splitserve.podSecurityContext" -}}
{{- $root := .root.Values.podSecurityContext -}}
{{- if .asRoot -}}
runAsUser: 0
{{- else -}}
runAsNonRoot: true
runAsUser: {{ $root.runAsUser }}
{{- end }}
fsGroup: {{ $root.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "splitserve.headPod" -}}
{{- $head := .Values.head -}}
metadata:
  labels:
    {{- include "splitserve.selectorLabels" . | nindent 4 }}
    splitserve.io/pool: head
    {{- with $head.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $head.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "splitserve.serviceAccountName" . }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "splitserve.podSecurityContext" (dict "root" . "asRoot" false) | nindent 4 }}
  {{- include "splitserve.scheduling" $head | nindent 2 }}
  containers:
    - name: ray-head
      image: {{ include "splitserve.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      ports:
        - {name: gcs, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        - {name: serve, containerPort: {{ include "splitserve.port" . }}}
        - {name: metrics, containerPort: 8080}
        - {name: as-metrics, containerPort: 44217}
        - {name: dash-metrics, containerPort: 44227}
      env:
        {{- include "splitserve.env" (dict "root" . "env" $head.env) | nindent 8 }}
      {{- with $head.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- toYaml $head.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
  volumes:
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $head.shmSize }}}
{{- end -}}

{{/* Pod template of one worker group. Takes root and group. */}}
{{- define "splitserve.workerPod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $group := index $values.workers .group -}}
metadata:
  labels:
    {{- include "splitserve.selectorLabels" $root | nindent 4 }}
    splitserve.io/pool: {{ .group }}
    {{- with $group.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $group.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "splitserve.serviceAccountName" $root }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add (include "splitserve.graceSeconds" $root | int) $values.lifecycle.replacementSeconds }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $group.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- if $group.hostPID }}
  hostPID: true
  {{- end }}
  {{- if $group.hostIPC }}
  hostIPC: true
  {{- end }}
  securityContext:
    {{- include "splitserve.podSecurityContext" (dict "root" $root "asRoot" (and $group.rdma.enabled $group.rdma.runAsRoot)) | nindent 4 }}
  {{- include "splitserve.scheduling" $group | nindent 2 }}
  containers:
    - name: ray-worker
      image: {{ include "splitserve.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      ports:
        - {name: serve, containerPort: {{ include "splitserve.port" $root }}}
        - {name: metrics, containerPort: 8080}
      env:
        {{- include "splitserve.env" (dict "root" $root "env" $group.env) | nindent 8 }}
      {{- with $group.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      lifecycle:
        preStop:
          exec:
            command:
              - python
              - -m
              - cluster.lifecycle.node_drain
              - --delay-s={{ $values.lifecycle.preStopDelaySeconds }}
              - --replacement-s={{ $values.lifecycle.replacementSeconds }}
              - --timeout-s={{ include "splitserve.drainSeconds" $root }}
      resources:
        {{- include "splitserve.workerResources" $group | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
          {{- if $group.rdma.enabled }}
          add: [IPC_LOCK]
          {{- end }}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        - {name: models, mountPath: {{ $values.modelCache.mountPath }}}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $group.shmSize }}}
    - name: models
      {{- if $values.modelCache.enabled }}
      persistentVolumeClaim: {claimName: {{ include "splitserve.cacheClaim" $root }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ $values.modelCache.size }}}
      {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "splitserve.workerResources" -}}
{{- $devices := dict -}}
{{- if gt (int .gpus) 0 -}}
{{- $_ := set $devices .gpuResourceName (toString .gpus) -}}
{{- end -}}
{{- if .rdma.enabled -}}
{{- range $name, $count := .rdma.resources -}}
{{- $_ := set $devices $name (toString $count) -}}
{{- end -}}
{{- end -}}
{{- $resources := deepCopy .resources -}}
{{- range $kind := list "requests" "limits" -}}
{{- $_ := set $resources $kind (merge (dict) $devices (default dict (index $resources $kind))) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Where a pod may run: the same keys for head and workers. */}}
{{- define "splitserve.scheduling" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "runtimeClassName" "priorityClassName" }}
{{- with get $ $key }}
{{ $key }}:
{{- if kindIs "string" . }} {{ . }}{{ else }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
