"""A values file that is wrong is refused before anything is installed, by the name of the key."""

from __future__ import annotations

import helm_python
import pytest
import yaml

from tests.helm.chart import render

SEPARATE = """
placement: separate
config:
  pools:
    prefill: {node_labels: {splitserve.io/pool: prefill}}
    decode: {node_labels: {splitserve.io/pool: decode}}
"""

WRONG = {
    "unknown key": ("replicas: 3", "'replicas' not allowed"),
    "unknown key in a group": ("workers: {decode: {gpuss: 1}}", "'gpuss' not allowed"),
    "unknown section of the config": ("config: {pool: {}}", "'pool' not allowed"),
    "text for a number": ("workers: {paired: {gpus: two}}", "/workers/paired/gpus"),
    "negative": ("workers: {paired: {minReplicas: -1}}", "/workers/paired/minReplicas"),
    "no quantity": ("workers: {paired: {shmSize: 8 gigs}}", "/workers/paired/shmSize"),
    "no such placement": ("placement: colocated", "/placement"),
    "no such strategy": ("upgrade: {strategy: Rolling}", "/upgrade/strategy"),
    "no tag": ('image: {tag: ""}', "/image/tag"),
    "no version": ("rayVersion: latest", "/rayVersion"),
    "name too long": (f"fullnameOverride: {'a' * 48}", "/fullnameOverride"),
    "no such layout": ("config: {layout: together}", "/config/layout"),
    "split without prefill": ("config: {pools: {prefill: null}}", "config.pools.prefill"),
    "colocated with prefill": ("config: {layout: colocated}", "config.pools.prefill"),
    "two lanes with prefill": ("config: {layout: two_lanes}", "config.pools.prefill"),
    "loopback only": ("config: {server: {host: 127.0.0.1}}", "config.server.host"),
    "tokens to loopback": ("config: {ingress: {channel_host: 127.0.0.1}}", "config.ingress.channel_host"),
    "keys nobody reads": ("apiKey: {existingSecret: keys}", "config.auth.api_keys_env"),
    "misspelt key of the config": (
        "config: {pools: {decode: {kv_memory_fractoin: 0.8}}}",
        "'/config/pools/decode': additional properties 'kv_memory_fractoin' not allowed",
    ),
    "text for a number of the config": ("config: {model: {max_model_len: 8k}}", "'/config/model/max_model_len': got"),
    "number out of its bounds": ("config: {server: {port: 0}}", "'/config/server/port': minimum"),
    "no number of those allowed": ("config: {kv: {block_size: 17}}", "'/config/kv/block_size': value must be one of 8"),
    "number for a label": ("config: {ingress: {node_labels: {a: 1}}}", "'/config/ingress/node_labels/a': got number"),
    "no bound to grow to": (
        "config: {pools: {decode: {autoscaling: {min_replicas: 1}}}}",
        "'/config/pools/decode/autoscaling': missing property 'max_replicas'",
    ),
    "null for what has no default": ("config: {kv: {block_size: null}}", "'/config/kv/block_size'"),
    "null for a section": ("config: {transfer: null}", "'/config/transfer': got null, want object"),
    "Prometheus locked out": (
        "networkPolicy: {httpFrom: [{podSelector: {}}]}\nmetrics: {serviceMonitor: {enabled: true}}",
        "networkPolicy.metricsFrom",
    ),
    "separate without labels": ("placement: separate", "config.pools.prefill.node_labels"),
    "labels of no group": (
        "config: {pools: {decode: {node_labels: {splitserve.io/pool: decode}}}}",
        "config.pools.decode.node_labels",
    ),
    "ingress group without labels": (
        "workers: {ingress: {enabled: true}}\nconfig: {pools: {prefill: &p {node_labels: "
        "{splitserve.io/pool: paired}}, decode: *p}}",
        "config.ingress.node_labels",
    ),
    "more GPUs than a pod has": ("config: {pools: {decode: {num_gpus: 4}}}", "config.pools.decode.num_gpus"),
    "too few pods": ("config: {pools: {decode: {replicas: 4}}}", "workers.paired.maxReplicas"),
    "too few pods to grow": (
        SEPARATE.replace(
            "{splitserve.io/pool: decode}", "{splitserve.io/pool: decode}, autoscaling: {max_replicas: 3}"
        ),
        "workers.decode.maxReplicas",
    ),
    "too few pods without autoscaler": (
        "autoscaler: {enabled: false}\nworkers: {paired: {maxReplicas: 2}}\nconfig: {pools: {decode: {replicas: 3}}}",
        "workers.paired.replicas",
    ),
    "no range": ("workers: {paired: {minReplicas: 3, maxReplicas: 2}}", "workers.paired.minReplicas"),
    "outside the range": ("workers: {paired: {replicas: 3}}", "workers.paired.replicas"),
    "RDMA without a device": (SEPARATE + "workers: {decode: {rdma: {enabled: true}}}", "workers.decode.rdma.resources"),
    "CPU pods over loopback": (
        SEPARATE.replace("{node_labels", "{device: cpu, num_gpus: 0, node_labels"),
        "config.transfer.net_devices",
    ),
    "labels for the old autoscaler": (SEPARATE + "autoscaler: {version: v1}", "autoscaler.version"),
    "no Redis": ("gcsFaultTolerance: {enabled: true}", "gcsFaultTolerance.redisAddress"),
    "no gateway": (
        "upgrade: {strategy: NewClusterWithIncrementalUpgrade}",
        "upgrade.incremental.gatewayClassName",
    ),
    "step beyond surge": (
        "upgrade: {strategy: NewClusterWithIncrementalUpgrade, "
        "incremental: {gatewayClassName: g, stepSizePercent: 50}}",
        "upgrade.incremental.stepSizePercent",
    ),
    "incremental without autoscaler": (
        "upgrade: {strategy: NewClusterWithIncrementalUpgrade}\nautoscaler: {enabled: false}",
        "autoscaler.enabled",
    ),
    "ingress without host": ("ingress: {enabled: true}", "ingress.hosts"),
    "route without gateway": ("httpRoute: {enabled: true}", "httpRoute.parentRefs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_is_refused_by_the_name_of_the_key(name: str) -> None:
    text, key = WRONG[name]
    with pytest.raises(helm_python.HelmError) as caught:
        render(yaml.safe_load(text))
    assert key in str(caught.value)


def test_the_file_that_wrong_ones_are_made_of_is_right() -> None:
    assert set(render(yaml.safe_load(SEPARATE)).groups) == {"prefill", "decode"}
