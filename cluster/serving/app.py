"""The only wiring: from a config to a Ray Serve application. No behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cluster.autoscaling.scaling_options import ingress_deployment, pool_deployment
from cluster.config.parts import live_part
from cluster.config.root import Config
from cluster.config.serving import ServingConfig, SharedConfig
from cluster.serving.ingress import Ingress
from cluster.serving.replica_settings import IngressSettings, PoolSettings, engine_settings
from replicas.serving.decode_replica import DecodeReplica
from replicas.serving.prefill_replica import PrefillReplica
from replicas.settings import EngineSettings

# Our own bounds decide who waits and who is turned away; Serve's must never be met first.
_MAX_ONGOING = 100_000
# Routes nothing: it is how Serve tells an ingress which replicas there are.
_REQUEST_ROUTER = "cluster.routing.registry_feed:RegistryFeed"
_POOLS: dict[str, type] = {"decode": DecodeReplica, "prefill": PrefillReplica}


def build_app(config: Config) -> Any:
    """The application, to be given to `serve.run`. Imports Ray."""
    values = config.model_dump(mode="json", exclude_unset=True)
    pools = {
        name: _bind_pool(name, config, engine_settings(name, pool, config), pool_deployment(pool))
        for name, pool in config.pools.deployed().items()
    }
    options = ingress_deployment(config) | {"user_config": live_part(values)}
    return _bind_ingress(config, config, pools, options)


def build_shared_app(shared: SharedConfig, values: Mapping[str, Any]) -> Any:
    """The application that a Serve config completes: each deployment's own part lies there, under `deployments`.

    values: those of `shared`.
    """
    names = ["decode", "prefill"] if shared.layout == "split" else ["decode"]
    pools = {name: _bind_pool(name, shared, PoolSettings(name, dict(values)), {}) for name in names}
    return _bind_ingress(shared, IngressSettings(dict(values)), pools, {})


def _bind_pool(
    name: str,
    config: SharedConfig,
    settings: EngineSettings | Callable[[], EngineSettings],
    options: Mapping[str, Any],
) -> Any:
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    deployment = serve.deployment(
        name=name,
        max_ongoing_requests=_MAX_ONGOING,
        request_router_config=RequestRouterConfig(request_router_class=_REQUEST_ROUTER),  # type: ignore[arg-type]
        max_constructor_retry_count=1,
        **_leaving(config),
        **options,
    )(_POOLS[name])
    return deployment.bind(settings)


def _bind_ingress(
    config: SharedConfig,
    settings: ServingConfig | Callable[[], ServingConfig],
    pools: dict[str, Any],
    options: Mapping[str, Any],
) -> Any:
    from ray import serve

    deployment = serve.deployment(
        name="ingress",
        max_ongoing_requests=_MAX_ONGOING,
        max_constructor_retry_count=1,
        **_leaving(config),
        **options,
    )(serve.ingress()(Ingress))
    return deployment.bind(settings, pools["decode"], pools.get("prefill"))


def _leaving(config: SharedConfig) -> dict[str, Any]:
    """Health, drain and update, the same for every deployment. Serve kills what has not ended by the drain's end."""
    return {
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
        "graceful_shutdown_timeout_s": config.lifecycle.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "max_surge_percent": config.lifecycle.update_surge_percent,
    }
