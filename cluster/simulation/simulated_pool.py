"""Equal replicas of a simulated system."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.simulation.simulated_engine import SimulatedEngine
from cluster.simulation.step_model import StepModel
from scheduler.pool_limits import PoolLimits
from scheduler.prefix_book import PrefixOptions
from scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """engines: all that there ever were, by name. table: of those that take work, what routers are told."""

    name: str
    limits: PoolLimits
    kv_bytes_per_token: int
    steps: StepModel
    make_scheduler: Callable[[PrefixOptions | None], Scheduler]
    may_also: bool = False
    engines: dict[str, SimulatedEngine] = field(default_factory=dict)
    table: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def add(self, engine: SimulatedEngine) -> None:
        """It takes work from now on; all have the same model. Mutates."""
        limits = self.limits
        peer = {"fingerprint": "", "block_bytes": limits.block_size * self.kv_bytes_per_token}
        told = {
            "num_blocks": limits.num_blocks - limits.num_reserved_blocks,
            "num_prefix_blocks": engine.scheduler.num_prefix_blocks,
            "step_tokens": limits.max_step_tokens,
            "max_sequences": limits.max_sequences - engine.scheduler.capabilities.num_reserved_slots,
            "peer": peer,
            "may_also": self.may_also,
        }
        self.engines[engine.replica_id], self.table[engine.replica_id] = engine, told

    def retire(self, replica_id: str) -> None:
        """It takes no new work; what it has goes on to its end. Mutates. Raises KeyError."""
        del self.table[replica_id]

    @property
    def next_name(self) -> str:
        """Of a replica that is added now."""
        return f"{self.name}-{len(self.engines):04d}"

    def shares_used(self) -> tuple[float, float]:
        """Of the KV blocks of those that take work: the mean, and the most of one; zeros without any."""
        used = [self.engines[name].num_used_blocks for name in self.table]
        num_blocks = self.limits.num_blocks
        return (sum(used) / len(used) / num_blocks, max(used) / num_blocks) if used else (0.0, 0.0)
