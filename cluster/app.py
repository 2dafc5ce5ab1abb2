"""The only wiring: from a config to a Ray Serve application. No behaviour."""

from __future__ import annotations

from typing import Any

from cluster.admission_settings import admission_policy
from cluster.config import Config
from cluster.ingress import Ingress, model_source
from cluster.pool_config import DecodePoolConfig, PoolConfig
from cluster.scaling_options import ingress_options, pool_options
from cluster.version import VERSION
from replicas.decode_replica import DecodeReplica
from replicas.prefill_replica import PrefillReplica
from replicas.settings import EngineSettings, ModelSettings, TransferSettings
from scheduler.admission import AdmissionPolicy

# Our own bounds decide who waits and who is turned away; Serve's must never be met first.
_MAX_ONGOING = 100_000
_TARGET_ROUTER = "cluster.target_router:TargetRouter"


def build_app(config: Config) -> Any:
    """The application, to be given to `serve.run`. Imports Ray."""
    pools = {
        "decode": (DecodeReplica, config.pools.decode),
        "prefill": (PrefillReplica, config.pools.prefill),
    }
    bound = {name: _bind_pool(cls, name, pool, config) for name, (cls, pool) in pools.items() if pool is not None}
    return _bind_ingress(config, bound)


def _bind_pool(replica_class: type, name: str, pool: PoolConfig, config: Config) -> Any:
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    deployment = serve.deployment(
        name=name,
        **pool_options(pool),
        ray_actor_options=_actor_options(pool.node_labels, num_cpus=pool.num_cpus, num_gpus=pool.num_gpus),
        max_ongoing_requests=_MAX_ONGOING,
        request_router_config=RequestRouterConfig(request_router_class=_TARGET_ROUTER),  # type: ignore[arg-type]
        max_constructor_retry_count=1,
        **_leaving(config),
    )(replica_class)
    return deployment.bind(engine_settings(name, pool, config))


def _bind_ingress(config: Config, pools: dict[str, Any]) -> Any:
    from ray import serve

    deployment = serve.deployment(
        name="ingress",
        **ingress_options(config),
        ray_actor_options=_actor_options(config.ingress.node_labels, num_cpus=config.ingress.num_cpus),
        max_ongoing_requests=_MAX_ONGOING,
        max_constructor_retry_count=1,
        **_leaving(config),
    )(serve.ingress()(Ingress))
    return deployment.bind(config, pools["decode"], pools.get("prefill"))


def _leaving(config: Config) -> dict[str, Any]:
    """Health, drain and update, the same for every deployment. Serve kills what has not ended by the drain's end."""
    return {
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
        "graceful_shutdown_timeout_s": config.lifecycle.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "max_surge_percent": config.lifecycle.update_surge_percent,
    }


def _actor_options(node_labels: dict[str, str], **resources: float) -> dict[str, Any]:
    return {**resources, "label_selector": dict(node_labels)} if node_labels else dict(resources)


def engine_settings(name: str, pool: PoolConfig, config: Config) -> EngineSettings:
    """What a replica of this pool is told. Pure."""
    import ray

    decode = pool if isinstance(pool, DecodePoolConfig) else None
    return EngineSettings(
        pool=name,
        served_model_name=config.model.name,
        model=ModelSettings(
            source=model_source(config),
            cache_dir=str(config.model.cache_dir),
            dtype=config.model.dtype,
            max_model_len=config.model.max_model_len,
            load_format=config.model.load_format,
            trust_remote_code=config.model.trust_remote_code,
        ),
        transfer=TransferSettings(
            backend=config.transfer.backend,
            lease_s=config.transfer.lease_s,
            verify_digest=config.transfer.verify_digest,
            net_devices=config.transfer.net_devices,
        ),
        device=pool.device,
        num_threads=pool.num_threads,
        block_size=config.kv.block_size,
        kv_capacity_tokens=pool.kv_capacity_tokens,
        kv_memory_bytes=pool.kv_memory_bytes,
        kv_memory_fraction=pool.kv_memory_fraction,
        max_sequences=pool.max_running_sequences,
        max_step_tokens=pool.max_batch_tokens,
        lag=pool.lag,
        admission=admission_policy(decode.admission) if decode else AdmissionPolicy(),
        host_memory_bytes=decode.host_memory_bytes if decode else None,
        drain_timeout_s=config.lifecycle.drain_timeout_s,
        restart_after_s=config.lifecycle.restart_after_s,
        fault_dir=str(config.testing.fault_dir) if config.testing.fault_dir else None,
        step_record_dir=str(config.testing.step_record_dir) if config.testing.step_record_dir else None,
        version=VERSION,
        ray_version=ray.__version__,
        log_level=config.logging.level,
        log_format=config.logging.format,
    )
