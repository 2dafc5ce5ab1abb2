{{/* What of the SplitServe config decides about pods. */}}

{{- define "splitserve.layout" -}}
{{- dig "layout" "split" .Values.config -}}
{{- end -}}

{{/* Who takes HTTP connections: serve or haproxy. */}}
{{- define "splitserve.proxy" -}}
{{- dig "server" "proxy" "serve" .Values.config -}}
{{- end -}}

{{/* Names of the pools that are deployed, as JSON. */}}
{{- define "splitserve.pools" -}}
{{- if eq (include "splitserve.layout" .) "split" -}}["prefill","decode"]{{- else -}}["decode"]{{- end -}}
{{- end -}}

{{/* Names of the worker groups in use, as JSON. */}}
{{- define "splitserve.groups" -}}
{{- $groups := list "paired" -}}
{{- if eq .Values.placement "separate" -}}
{{- $groups = include "splitserve.pools" . | fromJsonArray -}}
{{- end -}}
{{- if .Values.workers.ingress.enabled -}}
{{- $groups = append $groups "ingress" -}}
{{- end -}}
{{- toJson $groups -}}
{{- end -}}

{{/* The config of one pool. Takes root and pool. */}}
{{- define "splitserve.pool" -}}
{{- dig "pools" .pool (dict) .root.Values.config | default dict | toJson -}}
{{- end -}}

{{/* Most replicas that a pool may have. Takes the pool's config. */}}
{{- define "splitserve.maxReplicas" -}}
{{- if .autoscaling -}}
{{- dig "max_replicas" 1 .autoscaling | int -}}
{{- else -}}
{{- dig "replicas" 1 . | int -}}
{{- end -}}
{{- end -}}

{{- define "splitserve.drainSeconds" -}}
{{- dig "lifecycle" "drain_timeout_s" 120.0 .Values.config | float64 | ceil | int -}}
{{- end -}}

{{/* Strictly more than the delay and the drain. */}}
{{- define "splitserve.graceSeconds" -}}
{{- add .Values.lifecycle.preStopDelaySeconds (include "splitserve.drainSeconds" . | int) .Values.lifecycle.marginSeconds -}}
{{- end -}}

{{/* Whether pairs of prefill and decode may lie in different pods: "true" or nothing. */}}
{{- define "splitserve.spansPods" -}}
{{- if and (eq (include "splitserve.layout" .) "split") (or (eq .Values.placement "separate") (gt (int .Values.workers.paired.maxReplicas) 1)) -}}true{{- end -}}
{{- end -}}

{{/* How KV gets from prefill to decode: a word and a sentence, separated by a line break. */}}
{{- define "splitserve.transport" -}}
{{- $decode := include "splitserve.pool" (dict "root" . "pool" "decode") | fromJson -}}
{{- $cuda := eq (dig "device" "cpu" $decode) "cuda" -}}
{{- $spans := include "splitserve.spansPods" . -}}
{{- $rdma := true -}}
{{- $host := true -}}
{{- range $name := include "splitserve.groups" . | fromJsonArray -}}
{{- if ne $name "ingress" -}}
{{- $group := index $.Values.workers $name -}}
{{- $rdma = and $rdma $group.rdma.enabled -}}
{{- $host = and $host $group.hostPID $group.hostIPC -}}
{{- end -}}
{{- end -}}
{{- if ne (include "splitserve.layout" .) "split" -}}
none
Layout {{ include "splitserve.layout" . }} hands no KV cache over.
{{- else if and (not $spans) $cuda -}}
CUDA IPC
Prefill and decode share a pod, so KV moves from GPU to GPU, over NVLink where there is one.
{{- else if not $spans -}}
shared memory
Prefill and decode share a pod without GPUs, so KV moves through /dev/shm.
{{- else if $rdma -}}
RDMA
Pods have RDMA devices. Check in a pod's log that UCX chose them: without, it falls to TCP.
{{- else if and $host $cuda -}}
CUDA IPC on one host, TCP between hosts
WARNING: between hosts KV moves by TCP at 0.3 to 0.5 GB/s. Keep the pods on one host, or enable rdma.
{{- else -}}
TCP
WARNING: pairs may lie in different pods, where KV moves by TCP at 0.3 to 0.5 GB/s. Use placement paired with one pod, or workers.*.rdma.enabled, or hostPID and hostIPC on one host.
{{- end -}}
{{- end -}}
