"""What replicas are told: made of the config at once or, for `serve deploy`, in the replica of what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.config.admission_settings import admission_policy
from cluster.config.file import section_of
from cluster.config.parts import own_part_here
from cluster.config.pool import DecodePoolConfig, PoolConfig
from cluster.config.serving import ServingConfig, SharedConfig
from cluster.same_names import by_names
from cluster.serving.ingress import model_source
from cluster.version import VERSION
from replicas.settings import EngineSettings, ModelSettings
from scheduler.admission import AdmissionPolicy
from scheduler.lane_split import LaneObjectives


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

    if isinstance(pool, DecodePoolConfig):
        decode: dict[str, Any] = {"admission": admission_policy(pool.admission)}
    else:
        decode = {"admission": AdmissionPolicy(), "lanes": LaneObjectives()}
    return by_names(
        EngineSettings,
        config,
        pool,
        pool=name,
        served_model_name=config.model.name,
        model=by_names(ModelSettings, config.model, source=model_source(config)),
        has_prefix_cache=config.prefix_cache.enabled,
        version=VERSION,
        ray_version=ray.__version__,
        **decode,
    )
