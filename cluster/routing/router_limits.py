"""How patient a router is, and how much may wait at it: keys of the config under their names there."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.settings import unconfigured


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """queue_timeout_s: for admission. handoff_timeout_s: from there to the first token that decode adds, prefill
    included. tail_s: for what is still on its way once the other side has said that it is done.
    """

    queue_timeout_s: float
    handoff_timeout_s: float
    tail_s: float = unconfigured(5.0)

    @property
    def moment_s(self) -> float:
        """That each attempt has at least, however long its request has waited: to be admitted where there is room."""
        return min(self.queue_timeout_s, self.tail_s)


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """The config's section `migration`. max_at_once: moves of one router whose old replica has not stopped yet.
    admit_timeout_s: how long the new replica may take to promise memory.
    """

    enabled: bool = True
    relieve_memory: bool = True
    max_at_once: int = 8
    admit_timeout_s: float = unconfigured(5.0)


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """retry_delay_s doubles with each retry.

    frozen_after_s: silence of a replica after which it is given up; recovery_timeout_s: how long a stream that has
    begun waits for another replica when none is left; cold_start_timeout_s: how long anybody waits for replicas that
    were ordered. settle_s: for so long who was sent to a replica is not moved to another that has room.
    """

    max_queued_requests: int
    max_retries: int
    block_size: int
    attempt: AttemptLimits
    retry_delay_s: float = unconfigured(0.05)
    frozen_after_s: float = 5.0
    recovery_timeout_s: float = 30.0
    cold_start_timeout_s: float = 300.0
    settle_s: float = unconfigured(1.0)
    migration: MigrationLimits = MigrationLimits()
