"""Which replicas may work together on a request, and which of them do: the cheapest by the routing policy.

What no policy can change: replicas that exchange KV are of one fingerprint, a request that is bound to a model stays
with it, nobody gets what can never fit, and who failed a request is asked again only if there is no other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from cluster.policies.policy_table import POLICIES
from cluster.policies.routing_policy import (
    CandidateT,
    Costs,
    DecodeCandidate,
    Need,
    NeverFits,
    Pairs,
    PrefillCandidate,
    Route,
    RouteKind,
    RoutingRules,
    Unavailable,
    cheapest,
    unknown_pairs,
)


def choose_route(
    need: Need,
    decodes: Sequence[DecodeCandidate],
    prefills: Sequence[PrefillCandidate],
    rules: RoutingRules,
    excluded: Collection[str] = (),
    pairs: Pairs = unknown_pairs,
) -> Route | NeverFits | Unavailable:
    """The pair for one request. `excluded` replicas (they failed it before) are only taken when there is no other.

    Only replicas of one fingerprint make a pair. While the pools are updated from one model to another there may be
    none: then decode computes the prompt itself, whatever the rules say of a pool without replicas. It does so too
    where the policy finds that cheaper than the pair, and where hardly any of the prompt is to be computed; and always
    of what replicas may have died of.
    """
    able = [decode for decode in decodes if decode.model == need.model] if need.model else decodes
    is_short = not rules.has_prefill_pool or need.prompt_tokens <= rules.local_prefill_max_tokens
    is_local = is_short or need.is_suspect
    choose = choose_decode if is_local else partial(_choose_paired, prefills=prefills, pairs=pairs)
    decode = choose(need, able, rules=rules, excluded=excluded)
    if not isinstance(decode, DecodeCandidate):
        return decode
    kept = need.cached_at(decode.replica_id)

    def route(kind: RouteKind, prefill_id: str | None = None, avoided_id: str | None = None) -> Route:
        blocks = decode.projected_blocks(need)
        must_wait, cached = decode.must_wait(need), kept if prefill_id is None else need.cached_at(prefill_id)
        return Route(kind, decode.replica_id, prefill_id, must_wait, blocks, decode.model, avoided_id, cached, kept)

    if is_local or need.prompt_tokens - kept <= rules.local_prefill_max_tokens:
        return route(RouteKind.SUSPECT if need.is_suspect else RouteKind.LOCAL)
    prefill = choose_prefill(need, prefills, decode, rules, excluded, pairs)
    if isinstance(prefill, PrefillCandidate):
        if rules.local_by_cost:
            pair = pairs(decode.replica_id, prefill.replica_id)
            why = POLICIES[rules.policy].why_local(need, prefill, decode, rules, pair)
            if why is not None:
                return route(why, avoided_id=prefill.replica_id)
        return route(RouteKind.REMOTE, prefill.replica_id)
    if isinstance(prefill, Unavailable) and any(p.replica_id == decode.replica_id for p in prefills):
        return route(RouteKind.MIXED)  # there is nobody else
    if isinstance(prefill, Unavailable) and (rules.fallback_to_decode or prefills):
        return route(RouteKind.FALLBACK)
    return prefill


def _choose_paired(
    need: Need,
    decodes: Sequence[DecodeCandidate],
    prefills: Sequence[PrefillCandidate],
    rules: RoutingRules,
    excluded: Collection[str],
    pairs: Pairs,
) -> DecodeCandidate | NeverFits | Unavailable:
    """One that some prefill replica can hand its KV to, if it fits there. Of a pair that has failed in a part, rather
    one that has no partner, and has not failed.
    """
    known = {prefill.fingerprint for prefill in prefills}
    fresh = {prefill.fingerprint for prefill in prefills if prefill.replica_id not in excluded}

    def rank(decode: DecodeCandidate) -> int:
        if decode.replica_id in excluded:
            return 2
        if decode.fingerprint in fresh:
            return 0
        return 2 if decode.fingerprint in known else 1

    for worst in (0, 1, 2):
        those = [decode for decode in decodes if rank(decode) <= worst]
        decided = choose_decode(need, those, rules, excluded, prefills, pairs)
        if isinstance(decided, DecodeCandidate):
            return decided
    return decided


def choose_decode(
    need: Need,
    candidates: Sequence[DecodeCandidate],
    rules: RoutingRules,
    excluded: Collection[str] = (),
    prefills: Sequence[PrefillCandidate] = (),
    pairs: Pairs = unknown_pairs,
) -> DecodeCandidate | NeverFits | Unavailable:
    """Who generates. prefills: who may compute the prompt; none: it does so itself."""
    policy = POLICIES[rules.policy]

    def costs(those: Sequence[DecodeCandidate]) -> Costs:
        able = [prefill for prefill in prefills if prefill.replica_id not in excluded] if excluded else prefills
        return policy.decode_costs(need, those, rules, able, pairs)

    return _choose("decode", need.decode_blocks, candidates, excluded, costs)


def choose_prefill(
    need: Need,
    candidates: Sequence[PrefillCandidate],
    decode: DecodeCandidate,
    rules: RoutingRules,
    excluded: Collection[str] = (),
    pairs: Pairs = unknown_pairs,
) -> PrefillCandidate | NeverFits | Unavailable:
    """Who computes the prompt for this decode replica: one of those that are like it."""
    alike = [p for p in candidates if p.fingerprint == decode.fingerprint and p.replica_id != decode.replica_id]
    policy = POLICIES[rules.policy]

    def costs(those: Sequence[PrefillCandidate]) -> Costs:
        return policy.prefill_costs(need, those, decode, rules, pairs)

    return _choose("prefill", need.prefill_blocks, alike, excluded, costs)


def _choose(
    pool: str,
    needed_blocks: int,
    candidates: Sequence[CandidateT],
    excluded: Collection[str],
    costs: Callable[[Sequence[CandidateT]], Costs],
) -> CandidateT | NeverFits | Unavailable:
    """The cheapest of those large enough that have not failed, or, without one, that have. Equal ones: by name."""
    if not candidates:
        return Unavailable(pool)
    fitting = [c for c in candidates if c.total_blocks >= needed_blocks]
    if not fitting:
        return NeverFits(pool, needed_blocks, max(c.total_blocks for c in candidates))
    fresh = ([c for c in fitting if c.replica_id not in excluded] or fitting) if excluded else fitting
    if len(fresh) == 1:
        return fresh[0]
    return cheapest(fresh, costs(fresh))
