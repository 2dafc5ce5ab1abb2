"""What it costs, in seconds, to compute a prompt at a prefill replica or beside the streams of decode. Pure.

Counted are the seconds that requests lose, all together: those until the prompt's KV is where its tokens are generated,
and those that other streams wait meanwhile. So one second of ten streams is as dear as ten of one request.

What a replica has of the prompt in its prefix cache it need not compute, nor read: the rest counts (`Need.cached`).

What is not known yet counts nothing, so that it is tried and becomes known. A later term (another role of a replica) is
added here.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.policies.routing_policy import DecodeCandidate, Need, Pair, PrefillCandidate, RouteKind, RoutingRules

# What a prompt's way over a prefill replica takes in messages: one more call and its answer (0.27 ms by
# docs/control-path.md), the handoff's notification and its confirmation (looked for every 0.2 ms).
MESSAGES_S = 0.001
# What it counts that a request has failed on such a way: dearer than any wait that it may have elsewhere.
LOST_S = 60.0
# Of a prefill replica while nobody has been measured. It makes no difference between those, but to a penalty.
GUESSED_TOKENS_PER_S = 10_000.0


def remote_s(
    need: Need,
    prefill: PrefillCandidate,
    decode: DecodeCandidate,
    rules: RoutingRules,
    pair: Pair,
    tokens_per_s: float,
) -> float:
    """Computed by this prefill replica, read by this decode replica. tokens_per_s: of the former, above zero.

    A read waits for its prompt, and for those whose KV goes the same way before it: whatever takes longer. Of a pair
    that has not been measured other_node_penalty stands for the longer way of its KV.
    """
    computed_tokens = prefill.queued_tokens + need.uncached_at(prefill.replica_id)
    read_tokens = need.uncached_at(decode.replica_id)
    if pair.bytes_per_s:
        token_s = decode.block_bytes / (need.block_size * pair.bytes_per_s)
        cost_s = max(computed_tokens / tokens_per_s, pair.coming_tokens * token_s) + read_tokens * token_s
    else:
        far = rules.other_node_penalty * read_tokens if prefill.node_id != decode.node_id else 0.0
        cost_s = (computed_tokens + far) / tokens_per_s
    return cost_s + MESSAGES_S + pair.penalty_s + need.num_lost * LOST_S


def local_s(need: Need, decode: DecodeCandidate, rules: RoutingRules, tokens_per_s: float) -> float:
    """Computed by this decode replica, behind the prompts that wait there. tokens_per_s: of prompts, above zero.

    It is computed in steps of step_tokens, rows included. Each stream there waits for its next token as long as
    such a step takes; what goes beyond itl_budget_s counts as a second of the prompt's does, for each stream and step,
    and for one stream more: the next one to come stands behind the prompt too, so that an idle replica costs something.
    """
    num_tokens = need.uncached_at(decode.replica_id)
    prompt_s = num_tokens / tokens_per_s
    stalled_s = prompt_s
    if rules.itl_budget_s:
        chunk = max(1, decode.step_tokens - decode.num_rows) if decode.step_tokens else num_tokens
        num_steps, rest = divmod(num_tokens, chunk)
        stalled_s = num_steps * max(0.0, chunk / tokens_per_s - rules.itl_budget_s)
        stalled_s += max(0.0, rest / tokens_per_s - rules.itl_budget_s)
    return decode.queued_tokens / tokens_per_s + prompt_s + (decode.num_rows + 1) * stalled_s


def why_local(
    need: Need, prefill: PrefillCandidate, decode: DecodeCandidate, rules: RoutingRules, pair: Pair
) -> RouteKind | None:
    """None where the way over the prefill replica costs no more, and, as long as neither of the two has computed a
    prompt, unless it has failed. Else why it is dearer: it has failed; or only for what decode has in its cache; or the
    larger part of its cost is the KV's way, or the prefill replica's work.

    Of two rates of which one is unknown the other stands for both: they have the same model.
    """
    has_failed = need.num_lost or pair.penalty_s
    if not (prefill.tokens_per_s or decode.tokens_per_s):
        return RouteKind.FAILED_PAIR if has_failed else None
    here_s = local_s(need, decode, rules, decode.tokens_per_s or prefill.tokens_per_s)
    tokens_per_s = prefill.tokens_per_s or decode.tokens_per_s
    there_s = remote_s(need, prefill, decode, rules, pair, tokens_per_s)
    if there_s <= here_s:
        return None
    if has_failed:
        return RouteKind.FAILED_PAIR
    if need.cached_at(decode.replica_id):
        without = replace(need, cached={**need.cached, decode.replica_id: 0})
        here_s = local_s(without, decode, rules, decode.tokens_per_s or prefill.tokens_per_s)
        if remote_s(without, prefill, decode, rules, pair, tokens_per_s) <= here_s:
            return RouteKind.CACHED
    computed_s = (prefill.queued_tokens + need.uncached_at(prefill.replica_id)) / tokens_per_s
    return RouteKind.SLOW_PAIR if there_s - computed_s > computed_s else RouteKind.BUSY_PREFILL
