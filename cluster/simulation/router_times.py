"""How patient a simulated router is."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.settings import unconfigured


@dataclass(frozen=True, slots=True)
class RouterTimes:
    """Patience: keys of the config under their names there. settle_s: as in cluster.routing.router_limits; infinite:
    nobody is moved."""

    queue_timeout_s: float
    handoff_timeout_s: float
    request_timeout_s: float
    max_queued_requests: int
    cold_start_timeout_s: float = 300.0
    settle_s: float = unconfigured(1.0)
