"""The routing policies by name, which is what `routing.policy` in the config and the label `policy` of metrics say."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.policies.memory_then_queue import MEMORY_THEN_QUEUE
from cluster.policies.roles_by_cost import ROLES_BY_COST
from cluster.policies.routing_policy import RoutingPolicy

POLICIES: Mapping[str, RoutingPolicy] = {
    "memory_then_queue": MEMORY_THEN_QUEUE,
    "roles_by_cost": ROLES_BY_COST,
}
