"""What replicas are told: made of the config at once or, for `serve deploy`, in the replica of what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.admission_settings import admission_policy
from cluster.configuration.config_file import section_of
from cluster.configuration.config_parts import own_part_here
from cluster.configuration.pool_config import DecodePoolConfig, PoolConfig
from cluster.configuration.serving_config import ServingConfig, SharedConfig
from cluster.ingress import model_source
from cluster.version import VERSION
from replicas.settings import EngineSettings, ModelSettings, TransferSettings
from scheduler.admission import AdmissionPolicy


@dataclass(frozen=True)
class PoolSettings:
    """Called in a replica of the pool. shared: values of the part that all deployments have."""

    pool: str
    shared: dict[str, Any]

    def __call__(self) -> EngineSettings:
        """Raises ConfigError."""
        kind = DecodePoolConfig if self.pool == "decode" else PoolConfig
        pool = section_of(kind, own_part_here(), f"pools.{self.pool}.")
        return engine_settings(self.pool, pool, section_of(SharedConfig, self.shared))


@dataclass(frozen=True)
class IngressSettings:
    """Likewise, in an ingress."""

    shared: dict[str, Any]

    def __call__(self) -> ServingConfig:
        """Raises ConfigError."""
        return section_of(ServingConfig, self.shared | own_part_here())


def engine_settings(name: str, pool: PoolConfig, config: SharedConfig) -> EngineSettings:
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
