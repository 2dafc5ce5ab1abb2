"""How replicas leave, and how soon one that no longer answers is noticed."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from cluster.config.conflicts import Conflict
from cluster.config.section import Seconds, Section


class LifecycleConfig(Section):
    """Drain, and the health of replicas."""

    drain_timeout_s: Seconds = Field(
        default=120.0,
        description="Longest time a replica that leaves (scale-down, update, SIGTERM) has to end what it has begun, "
        "and the whole server when it is stopped; what can move to another decode replica (migration) does so at once. "
        "Beyond: what is left is cut, or computed again at another replica",
    )
    frozen_after_s: float = Field(
        default=5.0,
        ge=1.0,
        le=600.0,
        description="An engine replica that says nothing for so long, or whose engine does nothing, is frozen: it gets "
        "no more requests, what it had goes on elsewhere, and /health/ready counts without it",
    )
    restart_after_s: float = Field(
        default=30.0,
        ge=2.0,
        le=3_600.0,
        description="A replica whose engine has done nothing for so long, though it has work, ends itself: it is "
        "replaced. More than frozen_after_s",
    )
    recovery_timeout_s: float = Field(
        default=30.0,
        ge=0.0,
        le=3_600.0,
        description="How long a stream that has begun waits for another replica when those it needs have died. "
        "Beyond: it ends with an error. While one is on its way it waits as long as a start takes, "
        "ingress.cold_start_timeout_s at most. 0: it ends at once",
    )
    update_surge_percent: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Replicas, in percent of a pool, that an update may start before it stops old ones; needs free "
        "CPUs or GPUs for them. 0: old ones stop first, and a pool of one replica is empty for a while",
    )


def lifecycle_conflicts(lifecycle: LifecycleConfig) -> Iterator[Conflict]:
    """First others go on without a frozen engine, then it ends itself."""
    key, other = "lifecycle.restart_after_s", "lifecycle.frozen_after_s"
    if lifecycle.restart_after_s <= lifecycle.frozen_after_s:
        reason = f"{lifecycle.restart_after_s:g} s is no longer than {other}, {lifecycle.frozen_after_s:g} s; "
        yield Conflict(key, reason + "expected more", (key, other))
