"""How large and of what kind one simulated cluster is: drawn by its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from cluster.policies.routing_policy import RoutingRules
from cluster.routing.router_limits import AttemptLimits, MigrationLimits, RouterLimits
from replicas.kv.handoff_actions import HandoffTiming
from scheduler.admission import AdmissionPolicy
from scheduler.pool_limits import PoolLimits

LONGEST_PROMPT = 28
MOST_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Setting:
    """num_prefill: at the start; 0: colocated. quantile, host_share: as of `AdmissionPolicy`, and of the pool."""

    lag: int
    num_prefill: int
    num_decode: int
    num_routers: int
    prefill: PoolLimits
    decode: PoolLimits
    quantile: float | None
    host_share: float
    has_prefix_cache: bool
    has_digests: bool
    max_blocks_in_flight: int
    step_s: float
    drain_timeout_s: float
    rules: RoutingRules
    limits: RouterLimits
    timing: HandoffTiming

    @property
    def admission(self) -> AdmissionPolicy:
        return AdmissionPolicy(self.quantile, min_samples=2)

    @property
    def max_blocks(self) -> int:
        """Of one sequence."""
        return -(-(LONGEST_PROMPT + MOST_TOKENS) // self.decode.block_size) + 1

    @staticmethod
    def of(rng: random.Random) -> Setting:
        block_size = rng.choice([1, 2, 4, 4, 8])
        is_colocated = rng.random() < 0.1
        max_sequences = rng.randint(3, 8)
        decode_tokens = rng.choice([110, 160, 400])
        return Setting(
            lag=rng.randint(0, 1),
            num_prefill=0 if is_colocated else rng.choice([1, 2, 2, 3]),
            num_decode=rng.choice([1, 2, 2, 3]),
            num_routers=rng.choice([1, 1, 2]),
            prefill=PoolLimits(rng.choice([80, 120, 240]) // block_size, block_size, rng.randint(2, 4), 16),
            decode=PoolLimits(decode_tokens // block_size, block_size, max_sequences, max_sequences + 12),
            quantile=rng.choice([None, 0.2, 0.5]),
            host_share=rng.choice([0.0, 0.3, 1.0]),
            has_prefix_cache=rng.random() < 0.7,
            has_digests=rng.random() < 0.4,
            max_blocks_in_flight=rng.choice([1, 4, 1000]),
            step_s=rng.choice([0.005, 0.02, 0.05]),
            drain_timeout_s=rng.choice([0.5, 4.0]),
            rules=RoutingRules(
                not is_colocated,
                local_prefill_max_tokens=rng.choice([0, 0, 6]),
                fallback_to_decode=rng.random() < 0.5,
                local_by_cost=rng.random() < 0.5,
            ),
            limits=RouterLimits(
                max_queued_requests=rng.choice([4, 100, 100]),
                max_retries=rng.choice([2, 4, 8]),
                block_size=block_size,
                attempt=AttemptLimits(3.0, 2.0, 0.5),
                frozen_after_s=rng.choice([0.6, 1.2]),
                recovery_timeout_s=4.0,
                cold_start_timeout_s=4.0,
                migration=MigrationLimits(rng.random() < 0.85, rng.choice([1, 8]), admit_timeout_s=1.0),
            ),
            timing=HandoffTiming(
                lease_s=rng.choice([0.3, 1.0, 3.0]),
                resend_s=0.02,
                max_resend_s=0.3,
                remember_s=20.0,
                quarantine_s=1.0,
                ask_peers_s=3.0,
            ),
        )
