"""Decode by the memory that is free there, prefill by the wait for the prompt's end."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.policies.routing_policy import (
    Costs,
    DecodeCandidate,
    Need,
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


def soonest(need: Need, candidates: Sequence[PrefillCandidate], decode: DecodeCandidate, rules: RoutingRules) -> Costs:
    """The replica at which the prompt is computed soonest: what waits there and itself, at the rate measured there; on
    another node than decode's with the penalty, which stands for the longer way of its KV.

    Where no rate is known yet it is taken to be the mean of the others'; then whoever has the fewest tokens waiting.
    """
    known = [found.tokens_per_s for found in candidates if found.tokens_per_s > 0.0]
    typical = sum(known) / len(known) if known else 1.0
    near = need.prompt_tokens
    far = near * (1.0 + rules.other_node_penalty)
    return [
        (
            (found.queued_tokens + (near if found.node_id == decode.node_id else far))
            / (found.tokens_per_s or typical),
            found.queued_tokens,
        )
        for found in candidates
    ]


MEMORY_THEN_QUEUE = RoutingPolicy(decode_costs=roomiest, prefill_costs=soonest)
