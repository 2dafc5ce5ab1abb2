"""The whole configuration. Pure values: imports neither Ray nor torch, and reads no file.

`cluster.config_file.load_config` makes one from a YAML file; `Config.model_validate(mapping)` makes one in code,
with the same checks except those that look at files.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from cluster.autoscaling_conflicts import autoscaling_conflicts, memory_conflicts, pair_conflicts
from cluster.config_conflicts import (
    Conflict,
    batch_conflicts,
    device_conflicts,
    layout_conflicts,
    limit_conflicts,
    resource_conflicts,
    size_conflicts,
    timeout_conflicts,
)
from cluster.config_section import Section
from cluster.fairness_config import FairnessConfig
from cluster.http_config import AuthConfig, CorsConfig
from cluster.lifecycle_config import LifecycleConfig, lifecycle_conflicts
from cluster.model_config import ModelConfig
from cluster.pool_config import PoolsConfig
from cluster.service_config import (
    FaultsConfig,
    IngressConfig,
    KVConfig,
    LimitsConfig,
    LoggingConfig,
    RayConfig,
    RoutingConfig,
    ServerConfig,
    TransferConfig,
)
from cluster.slo_config import SloConfig
from cluster.tracing_config import TracingConfig

CONFLICT_ERROR_TYPE = "conflict"


class Config(Section):
    """Everything that can be configured. An instance is consistent: its conflicts were checked when it was made."""

    model: ModelConfig = Field(default=ModelConfig(), description="The model that is served")
    layout: Literal["split", "colocated"] = Field(
        default="split",
        description="split: prefill and decode on separate pools. colocated: only the decode pool, which prefills too",
    )
    server: ServerConfig = Field(default=ServerConfig(), description="Where HTTP is served")
    auth: AuthConfig = Field(default=AuthConfig(), description="Who may call the API, by API keys")
    cors: CorsConfig = Field(default=CorsConfig(), description="Web pages that may call the API")
    ingress: IngressConfig = Field(default=IngressConfig(), description="The replicas that take HTTP requests")
    pools: PoolsConfig = Field(description="The pools of engine replicas")
    slo: SloConfig = Field(default=SloConfig(), description="What users are promised")
    kv: KVConfig = Field(default=KVConfig(), description="The paged KV cache")
    transfer: TransferConfig = Field(default=TransferConfig(), description="The handoff from prefill to decode")
    routing: RoutingConfig = Field(default=RoutingConfig(), description="Which replicas a request goes to")
    fairness: FairnessConfig = Field(default=FairnessConfig(), description="How the server's users share it")
    lifecycle: LifecycleConfig = Field(default=LifecycleConfig(), description="How replicas leave, and their health")
    limits: LimitsConfig = Field(default=LimitsConfig(), description="What one HTTP request may ask for")
    logging: LoggingConfig = Field(default=LoggingConfig(), description="What is logged")
    tracing: TracingConfig = Field(default=TracingConfig(), description="OpenTelemetry traces of requests")
    ray: RayConfig = Field(default=RayConfig(), description="The Ray instance that `splitserve serve` starts")
    testing: FaultsConfig = Field(default=FaultsConfig(), description="For SplitServe's own tests; leave it out")

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        conflicts = list(self._conflicts())
        if conflicts:
            raise ValidationError.from_exception_data("Config", [_error_details(found) for found in conflicts])
        return self

    def _conflicts(self) -> chain[Conflict]:
        return chain(
            layout_conflicts(self.layout, self.pools),
            size_conflicts(self.model, self.kv, self.pools),
            device_conflicts(self.pools),
            batch_conflicts(self.limits, self.pools),
            timeout_conflicts(self.ingress, self.transfer),
            limit_conflicts(self.model, self.limits),
            lifecycle_conflicts(self.lifecycle),
            resource_conflicts(self.ray, self.reserved_cpus),
            autoscaling_conflicts(self.ingress, self.pools),
            pair_conflicts(self.model, self.transfer, self.pools),
            memory_conflicts(self.model, self.kv, self.pools),
        )

    @property
    def reserved_cpus(self) -> float:
        """Logical CPUs that all replicas reserve together, when each pool is as large as it may be."""
        pools = self.pools.deployed().values()
        num_cpus = sum(pool.most_replicas * pool.num_cpus for pool in pools)
        return self.ingress.most_replicas * self.ingress.num_cpus + num_cpus

    @property
    def autoscales(self) -> bool:
        """Whether anything grows or shrinks by itself."""
        return self.pools.autoscales or self.ingress.autoscaling is not None

    @property
    def ray_num_cpus(self) -> int:
        """What `ray.init` is given: ray.num_cpus, or enough for all replicas."""
        if self.ray.num_cpus is not None:
            return self.ray.num_cpus
        # One more: a replica that replaces another starts while that one still holds its own.
        return math.ceil(self.reserved_cpus) + 1


def _error_details(conflict: Conflict) -> InitErrorDetails:
    # The sentence is an argument, not the template: braces in it would be taken for placeholders.
    context = {"reason": conflict.reason, "reads": conflict.reads}
    error = PydanticCustomError(CONFLICT_ERROR_TYPE, "{reason}", context)
    return InitErrorDetails(type=error, loc=tuple(conflict.key.split(".")), input=None)
