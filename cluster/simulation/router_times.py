"""How patient a simulated router is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterTimes:
    """Patience: keys of the config under their names there."""

    queue_timeout_s: float
    handoff_timeout_s: float
    request_timeout_s: float
    max_queued_requests: int
