"""Decode by the memory that is free there, prefill by the time until the prompt's KV is at decode."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.policies.prefill_cost import GUESSED_TOKENS_PER_S, local_s, remote_s, why_local
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


def roomiest(
    need: Need,
    candidates: Sequence[DecodeCandidate],
    rules: RoutingRules,
    prefills: Sequence[PrefillCandidate],
    pairs: Pairs,
) -> Costs:
    """One that admits it at once, if any does; of these the one with the most room by projection, then the fewest of
    our requests, then the quickest steps. Where some have a part of the prompt, the seconds count that this saves
    (`_way_s`), against those that its room is worth (`_room_s`).
    """
    costs = [(-found.free_blocks, found.num_in_flight, found.step_s) for found in candidates]
    if need.cached and any(found.replica_id in need.cached for found in candidates):
        lost_s = _lost_s(need, candidates, rules, prefills, pairs)
        return [
            (found.must_wait(need), cost_s, *cost)
            for found, cost_s, cost in zip(candidates, lost_s, costs, strict=True)
        ]
    # Mostly whoever has the most room admits it at once: then nobody else need be asked whether he would.
    if not cheapest(candidates, costs).must_wait(need):
        return costs
    return [(found.must_wait(need), *cost) for found, cost in zip(candidates, costs, strict=True)]


def _lost_s(
    need: Need,
    candidates: Sequence[DecodeCandidate],
    rules: RoutingRules,
    prefills: Sequence[PrefillCandidate],
    pairs: Pairs,
) -> list[float]:
    """What a request loses at each of them, and others for its being there."""
    tokens_per_s = _typical(prefills) or _typical(candidates) or GUESSED_TOKENS_PER_S
    soonest_of = _soonest_by_fingerprint(need, prefills, tokens_per_s)
    steps_s = [found.step_s for found in candidates if found.step_s > 0.0]
    step_s = sum(steps_s) / len(steps_s) if steps_s else 0.0
    return [
        _way_s(need, found, soonest_of.get(found.fingerprint), rules, pairs, tokens_per_s)
        + _room_s(need, found, step_s)
        for found in candidates
    ]


def _way_s(
    need: Need,
    decode: DecodeCandidate,
    prefill: PrefillCandidate | None,
    rules: RoutingRules,
    pairs: Pairs,
    tokens_per_s: float,
) -> float:
    """Until its KV is there, by the cheaper way. prefill: of those that may compute it the one that would be the first
    to be done; None: decode computes it. tokens_per_s: where it is not known."""
    here_s = math.inf
    if prefill is None or rules.local_by_cost:
        here_s = local_s(need, decode, rules, decode.tokens_per_s or tokens_per_s)
    if prefill is None:
        return here_s
    pair = pairs(decode.replica_id, prefill.replica_id)
    return min(here_s, remote_s(need, prefill, decode, rules, pair, prefill.tokens_per_s or tokens_per_s))


def _room_s(need: Need, decode: DecodeCandidate, step_s: float) -> float:
    """The part of the free memory that it takes, times for how long it takes it: so long others wait in the mean who
    need as much, once all is taken. step_s: of a typical replica; the same for all, as then the most room is cheapest.
    """
    stay_s = decode.expected_rows(need) * step_s
    return stay_s * decode.projected_blocks(need) / max(1, decode.free_blocks)


def _soonest_by_fingerprint(
    need: Need, prefills: Sequence[PrefillCandidate], tokens_per_s: float
) -> dict[str, PrefillCandidate]:
    """Of those of each fingerprint the one that is done first, wherever its KV is read."""
    best: dict[str, tuple[float, PrefillCandidate]] = {}
    for found in prefills:
        tokens = found.queued_tokens + need.uncached_at(found.replica_id)
        done_s = tokens / (found.tokens_per_s or tokens_per_s)
        if found.fingerprint not in best or done_s < best[found.fingerprint][0]:
            best[found.fingerprint] = done_s, found
    return {fingerprint: found for fingerprint, (_, found) in best.items()}


def soonest(
    need: Need, candidates: Sequence[PrefillCandidate], decode: DecodeCandidate, rules: RoutingRules, pairs: Pairs
) -> Costs:
    """The replica from which decode has the prompt's KV soonest (`prefill_cost.remote_s`), then the shortest queue.

    Where no rate is known yet it is taken to be the mean of the others'.
    """
    typical = _typical(candidates) or GUESSED_TOKENS_PER_S
    decode_id = decode.replica_id
    return [
        (
            remote_s(need, found, decode, rules, pairs(decode_id, found.replica_id), found.tokens_per_s or typical),
            found.queued_tokens,
        )
        for found in candidates
    ]


def _typical(candidates: Sequence[PrefillCandidate] | Sequence[DecodeCandidate]) -> float:
    """How fast they compute prompts, in the mean of those of which it is known; 0.0: of none."""
    known = [found.tokens_per_s for found in candidates if found.tokens_per_s > 0.0]
    return sum(known) / len(known) if known else 0.0


MEMORY_THEN_QUEUE = RoutingPolicy(decode_costs=roomiest, prefill_costs=soonest, why_local=why_local)
