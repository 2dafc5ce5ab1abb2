"""Whether requests can be served: every path that is configured has the replicas it needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.policies.routing_policy import RoutingRules
from cluster.routing.slow_transfers import SlowestRead

_MOST_NOTES = 4


@dataclass(frozen=True, slots=True)
class PoolHealth:
    """One pool as an ingress sees it.

    fingerprints: of each replica that may be chosen, of its model and KV layout: two with the same can exchange KV.
    num_able: replicas of the other pool that may do this one's work too.
    num_strangers: replicas with another tokenizer than this ingress, which are not used.
    num_lost: replicas that Serve lists and that are frozen, dead or leaving. can_cold_start: it has been scaled to
    zero, and a request will start a replica.
    """

    fingerprints: tuple[str, ...] = ()
    num_lost: int = 0
    num_strangers: int = 0
    can_cold_start: bool = False
    num_able: int = 0

    @property
    def is_served(self) -> bool:
        return bool(self.fingerprints) or self.num_able > 0 or self.can_cold_start


@dataclass(frozen=True, slots=True)
class Readiness:
    """missing_pools: those that a request needs and that have no replica. reasons: why it is not ready, notes: what is
    wrong all the same, a sentence each. slowest_read: of KV, of all that were measured."""

    missing_pools: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    num_lost: int = 0
    slowest_read: SlowestRead | None = None

    @property
    def is_ready(self) -> bool:
        return not self.reasons


def readiness(
    pools: Mapping[str, PoolHealth],
    rules: RoutingRules,
    is_draining: bool = False,
    faulty: Sequence[object] = (),
    slowest_read: SlowestRead | None = None,
) -> Readiness:
    """pools: by name, those that are deployed. faulty: a sentence of each replica that can't work with others, or reads
    KV too slowly."""
    num_lost = sum(pool.num_lost for pool in pools.values())
    reasons = ["this server is being stopped"] if is_draining else []
    needed = [name for name in pools if name == "decode" or not rules.fallback_to_decode]
    missing = tuple(name for name in needed if not pools[name].is_served)
    for name in missing:
        lost = f": {pools[name].num_lost} do not answer" if pools[name].num_lost else ""
        strangers = f": {pools[name].num_strangers} have another tokenizer" if pools[name].num_strangers else ""
        reasons.append(f"no {name} replica can be used{lost}{strangers}")
    notes = [str(replica) for replica in faulty[:_MOST_NOTES]]
    if not missing and "prefill" in needed and not _can_exchange(pools["prefill"], pools["decode"]):
        notes.insert(0, "no prefill replica can hand its KV cache to a decode replica: decode computes all prompts")
    return Readiness(missing, tuple(reasons), tuple(notes), num_lost, slowest_read)


def _can_exchange(prefill: PoolHealth, decode: PoolHealth) -> bool:
    """Or will be able to: what is started for a request is of the same configuration."""
    if not prefill.fingerprints or not decode.fingerprints:
        return True
    return not set(prefill.fingerprints).isdisjoint(decode.fingerprints)
