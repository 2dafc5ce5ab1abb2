"""How many replicas Ray Serve is told to run of each deployment, and what each of them takes of a node. Pure.

Delays and demand are the policy's (`autoscaling_policy`), so Serve's own delays are 0: it applies what the policy says
at once, within the bounds.
"""

from __future__ import annotations

from typing import Any

from cluster.config.pool import PoolConfig
from cluster.config.root import Config
from cluster.config.service import IngressConfig

# How often an ingress tells the controller its demand, and how long the controller keeps what it was told.
_REPORT_INTERVAL_S = 1.0
_KEPT_S = 10.0


def pool_deployment(pool: PoolConfig) -> dict[str, Any]:
    """Options of `serve.deployment`."""
    return {**_pool_replicas(pool), "ray_actor_options": _takes(pool, num_gpus=pool.num_gpus)}


def ingress_deployment(config: Config) -> dict[str, Any]:
    """Options of `serve.deployment`."""
    return {**_ingress_replicas(config), "ray_actor_options": _takes(config.ingress)}


def _takes(of: PoolConfig | IngressConfig, **resources: float) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": of.num_cpus, **resources}
    return options | {"label_selector": dict(of.node_labels)} if of.node_labels else options


def _pool_replicas(pool: PoolConfig) -> dict[str, Any]:
    scaling = pool.autoscaling
    if scaling is None:
        return {"num_replicas": pool.replicas}
    return {"autoscaling_config": _bounds(scaling.min_replicas, scaling.max_replicas, scaling.at_start)}


def _ingress_replicas(config: Config) -> dict[str, Any]:
    """Where a pool scales, ingresses report its demand, which takes an autoscaling_config of theirs even if their
    number is fixed.
    """
    ingress = config.ingress
    if not config.autoscales:
        return {"num_replicas": ingress.replicas}
    bounds = _bounds(ingress.first_replicas, ingress.most_replicas, ingress.first_replicas)
    # Deprecated in favour of an environment variable of the whole cluster, which a config can't set.
    return {"autoscaling_config": bounds | {"metrics_interval_s": _REPORT_INTERVAL_S, "look_back_period_s": _KEPT_S}}


def _bounds(least: int, most: int, first: int) -> dict[str, Any]:
    return {
        "min_replicas": least,
        "max_replicas": most,
        "initial_replicas": first,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "downscale_to_zero_delay_s": 0.0,
    }
