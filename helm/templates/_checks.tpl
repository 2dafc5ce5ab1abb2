{{/* Values that are each allowed but do not go together. Every message begins with the key to change. */}}

{{- define "splitserve.check" -}}
{{- include "splitserve.checkConfig" . -}}
{{- include "splitserve.checkLabels" . -}}
{{- include "splitserve.checkGroups" . -}}
{{- include "splitserve.checkCapacity" . -}}
{{- include "splitserve.checkObjects" . -}}
{{- end -}}

{{- define "splitserve.checkConfig" -}}
{{- $config := .Values.config -}}
{{- $layout := include "splitserve.layout" . -}}
{{- if not (dig "pools" "decode" nil $config) -}}
{{- fail "config.pools.decode: missing; every layout needs it" -}}
{{- end -}}
{{- if and (eq $layout "split") (not (dig "pools" "prefill" nil $config)) -}}
{{- fail "config.pools.prefill: missing; layout split needs both pools: add it, or set config.layout: colocated" -}}
{{- end -}}
{{- if and (ne $layout "split") (dig "pools" "prefill" nil $config) -}}
{{- fail (printf "config.pools.prefill: layout %s deploys only the decode pool: set config.pools.prefill: null" $layout) -}}
{{- end -}}
{{- if ne (dig "server" "host" "" $config) "0.0.0.0" -}}
{{- fail "config.server.host: must be 0.0.0.0, or nothing outside the pod reaches the server" -}}
{{- end -}}
{{- if ne (dig "ingress" "channel_host" "" $config) "auto" -}}
{{- fail "config.ingress.channel_host: must be auto, the address of each ingress's own pod" -}}
{{- end -}}
{{- $env := dig "auth" "api_keys_env" "" $config -}}
{{- if and .Values.apiKey.existingSecret (not $env) -}}
{{- fail "config.auth.api_keys_env: missing; apiKey.existingSecret is given, so name the variable for its keys, such as SPLITSERVE_API_KEYS" -}}
{{- end -}}
{{- with .Values.networkPolicy -}}
{{- if and .enabled .httpFrom (not .metricsFrom) $.Values.metrics.serviceMonitor.enabled -}}
{{- fail "networkPolicy.metricsFrom: missing; networkPolicy.httpFrom keeps Prometheus from the HTTP port, which metrics.serviceMonitor scrapes: say where Prometheus runs" -}}
{{- end -}}
{{- end -}}
{{- $devices := list -}}
{{- range $pool := include "splitserve.pools" . | fromJsonArray -}}
{{- $devices = append $devices (dig "pools" $pool "device" "cpu" $config) -}}
{{- end -}}
{{- if and (include "splitserve.spansPods" .) (has "cpu" $devices) (not (dig "transfer" "net_devices" "" $config)) -}}
{{- fail "config.transfer.net_devices: missing; on CPUs UCX uses loopback only, and pairs may lie in different pods: name the pods' interface, such as eth0" -}}
{{- end -}}
{{- end -}}

{{/* Replicas of a pool land on the pods of its group by the Ray label splitserve.io/pool. */}}
{{- define "splitserve.checkLabels" -}}
{{- $pools := include "splitserve.pools" . | fromJsonArray -}}
{{- $needed := or (eq .Values.placement "separate") .Values.workers.ingress.enabled -}}
{{- range $pool := $pools -}}
{{- $group := eq $.Values.placement "separate" | ternary $pool "paired" -}}
{{- $found := dig "pools" $pool "node_labels" "splitserve.io/pool" "" $.Values.config -}}
{{- if and (ne $found $group) (or $found $needed) -}}
{{- fail (printf "config.pools.%s.node_labels: must be {splitserve.io/pool: %s} with these worker groups, so that replicas find their pods" $pool $group) -}}
{{- end -}}
{{- end -}}
{{- $found := dig "ingress" "node_labels" "splitserve.io/pool" "" .Values.config -}}
{{- if and .Values.workers.ingress.enabled (ne $found "ingress") -}}
{{- fail "config.ingress.node_labels: must be {splitserve.io/pool: ingress} with workers.ingress.enabled" -}}
{{- end -}}
{{- if and $found (not (has $found (include "splitserve.groups" . | fromJsonArray))) -}}
{{- fail (printf "config.ingress.node_labels: there is no worker group %s with these values" $found) -}}
{{- end -}}
{{- end -}}

{{- define "splitserve.checkGroups" -}}
{{- range $name := include "splitserve.groups" . | fromJsonArray -}}
{{- $group := index $.Values.workers $name -}}
{{- $min := int $group.minReplicas -}}
{{- $max := int $group.maxReplicas -}}
{{- if gt $min $max -}}
{{- fail (printf "workers.%s.minReplicas: %d is more than maxReplicas %d" $name $min $max) -}}
{{- end -}}
{{- if or (lt (int $group.replicas) $min) (gt (int $group.replicas) $max) -}}
{{- fail (printf "workers.%s.replicas: %d is not between minReplicas %d and maxReplicas %d" $name (int $group.replicas) $min $max) -}}
{{- end -}}
{{- if and $group.rdma.enabled (not $group.rdma.resources) -}}
{{- fail (printf "workers.%s.rdma.resources: missing; name the device resource of your nodes, such as rdma/hca: 1" $name) -}}
{{- end -}}
{{- if and (not $.Values.autoscaler.enabled) (lt (int $group.replicas) 1) -}}
{{- fail (printf "workers.%s.replicas: 0 without autoscaler.enabled: nothing would ever start pods" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* GPUs that replicas ask for, against those that pods bring. */}}
{{- define "splitserve.checkCapacity" -}}
{{- range $name := include "splitserve.groups" . | fromJsonArray -}}
{{- $group := index $.Values.workers $name -}}
{{- $needed := 0.0 -}}
{{- range $pool := include "splitserve.pools" $ | fromJsonArray -}}
{{- if or (eq $name "paired") (eq $name $pool) -}}
{{- $config := include "splitserve.pool" (dict "root" $ "pool" $pool) | fromJson -}}
{{- $gpus := dig "num_gpus" 0 $config | float64 -}}
{{- if gt $gpus (float64 $group.gpus) -}}
{{- fail (printf "config.pools.%s.num_gpus: %v is more than workers.%s.gpus %d, what one pod has" $pool $gpus $name (int $group.gpus)) -}}
{{- end -}}
{{- $needed = addf $needed (mulf $gpus (include "splitserve.maxReplicas" $config | float64)) -}}
{{- end -}}
{{- end -}}
{{- $pods := $.Values.autoscaler.enabled | ternary $group.maxReplicas $group.replicas | int -}}
{{- if gt $needed (mulf (float64 $group.gpus) $pods) -}}
{{- $key := $.Values.autoscaler.enabled | ternary "maxReplicas" "replicas" -}}
{{- fail (printf "workers.%s.%s: %d pods of %d GPUs are too few: the replicas of the config need %v GPUs" $name $key $pods (int $group.gpus) $needed) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "splitserve.checkObjects" -}}
{{- $values := .Values -}}
{{- if and $values.autoscaler.enabled (eq $values.autoscaler.version "v1") (gt (len (include "splitserve.groups" . | fromJsonArray)) 1) -}}
{{- fail "autoscaler.version: v1 does not know Ray node labels, by which several worker groups are told apart: use v2" -}}
{{- end -}}
{{- if and $values.gcsFaultTolerance.enabled (not $values.gcsFaultTolerance.redisAddress) -}}
{{- fail "gcsFaultTolerance.redisAddress: missing; give the address of a Redis, such as redis:6379" -}}
{{- end -}}
{{- if eq $values.upgrade.strategy "NewClusterWithIncrementalUpgrade" -}}
{{- if not $values.autoscaler.enabled -}}
{{- fail "autoscaler.enabled: must be true with upgrade.strategy NewClusterWithIncrementalUpgrade" -}}
{{- end -}}
{{- if not $values.upgrade.incremental.gatewayClassName -}}
{{- fail "upgrade.incremental.gatewayClassName: missing; upgrade.strategy NewClusterWithIncrementalUpgrade moves traffic with a gateway" -}}
{{- end -}}
{{- if gt (int $values.upgrade.incremental.stepSizePercent) (int $values.upgrade.incremental.maxSurgePercent) -}}
{{- fail "upgrade.incremental.stepSizePercent: is more than maxSurgePercent" -}}
{{- end -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.hosts) -}}
{{- fail "ingress.hosts: missing; give at least one host name" -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not $values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: missing; name the gateway the route belongs to" -}}
{{- end -}}
{{- if gt (len (include "splitserve.fullname" .)) 47 -}}
{{- fail "fullnameOverride: at most 47 characters, or the operator refuses the RayService" -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "splitserve.fullname" .)) -}}
{{- fail (printf "fullnameOverride: the name %s must begin with a letter and have only a-z, 0-9 and -" (include "splitserve.fullname" .)) -}}
{{- end -}}
{{- end -}}
