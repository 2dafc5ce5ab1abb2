"""Decode by the memory that is free there, prefill by the time until the prompt's KV is at decode."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.policies.prefill_cost import GUESSED_TOKENS_PER_S, remote_s, why_local
from cluster.policies.routing_policy import (
    Costs,
    DecodeCandidate,
    Need,
    Pairs,
    PrefillCandidate,
    RoutingPolicy,
    RoutingRules,
    cheapest,
)


def roomiest(need: Need, candidates: Sequence[DecodeCandidate], rules: RoutingRules) -> Costs:
    """One that admits it at once, if any does; of these the one with the most room by projection, then the fewest of
    our requests, then the quickest steps.
    """
    costs = [(-found.free_blocks, found.num_in_flight, found.step_s) for found in candidates]
    # Mostly whoever has the most room admits it at once: then nobody else need be asked whether he would.
    if not cheapest(candidates, costs).must_wait(need):
        return costs
    return [(found.must_wait(need), *cost) for found, cost in zip(candidates, costs, strict=True)]


def soonest(
    need: Need, candidates: Sequence[PrefillCandidate], decode: DecodeCandidate, rules: RoutingRules, pairs: Pairs
) -> Costs:
    """The replica from which decode has the prompt's KV soonest (`prefill_cost.remote_s`), then the shortest queue.

    Where no rate is known yet it is taken to be the mean of the others'.
    """
    known = [found.tokens_per_s for found in candidates if found.tokens_per_s > 0.0]
    typical = sum(known) / len(known) if known else GUESSED_TOKENS_PER_S
    decode_id = decode.replica_id
    return [
        (
            remote_s(need, found, decode, rules, pairs(decode_id, found.replica_id), found.tokens_per_s or typical),
            found.queued_tokens,
        )
        for found in candidates
    ]


MEMORY_THEN_QUEUE = RoutingPolicy(decode_costs=roomiest, prefill_costs=soonest, why_local=why_local)
