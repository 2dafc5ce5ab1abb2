"""How pools and ingresses grow and shrink by themselves."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cluster.config.section import Section

# Where nobody says more: Python's packages, a model of a few GB, warming up.
GUESSED_START_S = 60.0

Delay = Annotated[float, Field(ge=0, le=86_400)]


class ScalingDelays(Section):
    """How long a demand must have been there before it is followed."""

    upscale_delay_s: Delay = Field(
        default=10.0,
        description="A pool grows to the least that was needed at every moment of so many seconds. 0: at once",
    )
    downscale_delay_s: Delay = Field(
        default=300.0, description="A pool shrinks to the most that was needed at any moment of so many seconds"
    )


class PoolAutoscalingConfig(ScalingDelays):
    """The number of a pool's replicas, by what its work needs. Instead of `replicas`."""

    min_replicas: int = Field(
        default=1, ge=0, le=1_024, description="Fewest replicas. 0: none without work; the next request starts one"
    )
    max_replicas: int = Field(ge=1, le=1_024, description="Most replicas")
    initial_replicas: int | None = Field(
        default=None, ge=0, le=1_024, description="Replicas when the server starts; null: min_replicas"
    )
    downscale_to_zero_delay_s: Delay = Field(
        default=600.0, description="With min_replicas 0: the last replica goes after so many seconds without work"
    )
    target_utilization: float = Field(
        default=0.8,
        ge=0.05,
        le=1,
        description="How full a pool is to be. prefill: of the prompt tokens a second that it was seen to compute. "
        "decode: of its KV cache and of max_running_sequences. Lower: more replicas, room for bursts",
    )
    expected_start_s: float = Field(
        default=GUESSED_START_S,
        gt=0,
        le=86_400,
        description="How long a replica is taken to take from its order until it serves, until starts have been "
        "measured. Who waits for memory waits twice as long for replicas on their way, and at most "
        "ingress.cold_start_timeout_s",
    )

    @property
    def at_start(self) -> int:
        """Replicas when the server starts."""
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas


class IngressAutoscalingConfig(ScalingDelays):
    """The number of ingress replicas, by the requests that are open. Instead of `replicas`."""

    min_replicas: int = Field(default=1, ge=1, le=256, description="Fewest ingresses; one must be there to be asked")
    max_replicas: int = Field(ge=1, le=256, description="Most ingresses")
    target_requests: int = Field(
        default=200, ge=1, le=100_000, description="Open requests, streams included, that one ingress is to carry"
    )
