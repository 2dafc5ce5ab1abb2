"""The whole configuration. Pure values: imports neither Ray nor torch, and reads no file.

`file.load_config` makes one from a YAML file; `Config.model_validate(mapping)` makes one in code, with the same
checks except those that look at files.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from cluster.config.autoscaling_conflicts import autoscaling_conflicts, memory_conflicts, pair_conflicts
from cluster.config.conflicts import (
    Conflict,
    batch_conflicts,
    device_conflicts,
    layout_conflicts,
    limit_conflicts,
    proxy_conflicts,
    resource_conflicts,
    role_conflicts,
    size_conflicts,
    timeout_conflicts,
)
from cluster.config.lifecycle import lifecycle_conflicts
from cluster.config.pool import PoolsConfig
from cluster.config.prefix_cache import host_memory_conflicts, prefix_cache_conflicts
from cluster.config.service import RayConfig
from cluster.config.serving import ServingConfig
from cluster.config.speculative import speculative_conflicts

CONFLICT_ERROR_TYPE = "conflict"


class Config(ServingConfig):
    """Everything that can be configured. An instance is consistent: its conflicts were checked when it was made."""

    pools: PoolsConfig = Field(description="The pools of engine replicas")
    ray: RayConfig = Field(default=RayConfig(), description="The Ray instance that `splitserve serve` starts")

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        conflicts = list(self._conflicts())
        if conflicts:
            raise ValidationError.from_exception_data("Config", [_error_details(found) for found in conflicts])
        return self

    def _conflicts(self) -> chain[Conflict]:
        return chain(
            layout_conflicts(self.layout, self.pools),
            proxy_conflicts(self.server),
            size_conflicts(self.model, self.kv, self.pools),
            device_conflicts(self.pools),
            batch_conflicts(self.limits, self.pools),
            role_conflicts(self.layout, self.routing.policy, self.model, self.pools),
            timeout_conflicts(self.ingress, self.transfer),
            limit_conflicts(self.model, self.limits),
            lifecycle_conflicts(self.lifecycle),
            speculative_conflicts(self.speculative, self.layout, self.pools),
            prefix_cache_conflicts(self.prefix_cache, self.auth, self.fairness),
            host_memory_conflicts(self.prefix_cache, self.pools),
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
