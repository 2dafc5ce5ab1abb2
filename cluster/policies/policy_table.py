"""The routing policies by name, which is what `routing.policy` in the config and the label `policy` of metrics say."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.policies.memory_then_queue import MEMORY_THEN_QUEUE
from cluster.policies.routing_policy import RoutingPolicy

POLICIES: Mapping[str, RoutingPolicy] = {
    "memory_then_queue": MEMORY_THEN_QUEUE,
}
