"""What users are promised: the service level objectives."""

from __future__ import annotations

from pydantic import Field

from cluster.config.section import Seconds, Section


class SloConfig(Section):
    """Objectives of one request. Metrics count what misses them, and autoscaling keeps the pools large enough."""

    ttft_s: Seconds = Field(default=2.0, description="Longest time to the first token, queue included")
    tpot_s: Seconds = Field(default=0.1, description="Longest mean time per output token after the first")
    e2e_s: Seconds | None = Field(default=None, description="Longest time to the end of the answer; null: none")
