"""Who generates and who computes the prompt, where replicas may do both: one cost in seconds, and roles as preferences.

Counted are the seconds that requests lose, all together. A prompt loses those until its first token (`_first_token_s`);
past the objective for that each counts for several. A stream loses what goes beyond its objective of time per token:
streams of a replica may stand still for prompts as long as their tokens still come in time in the mean, and that much
of a replica's time is free for prompts (`_Card.room_s`). What is within it counts little, but the more the more
streams stand still: so prompts gather where streams are few, and streams where prompts are few.

What keeps a replica's mixture as it is: a prompt beside streams costs these something from the first one on, and the
first stream on a replica that is busy with prompts would have its tokens late. So a role changes where that pays.

Pure. What is not known yet counts nothing, so that it is tried and becomes known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.policies.prefill_cost import GUESSED_TOKENS_PER_S, LOST_S, MESSAGES_S
from cluster.policies.routing_policy import (
    Costs,
    DecodeCandidate,
    Need,
    Pair,
    Pairs,
    PrefillCandidate,
    RouteKind,
    RoutingPolicy,
    RoutingRules,
)
from replicas.messages import PROMPT_SHARE_S

# Means are to be so much within the objectives: half of all requests is beyond its mean.
MARGIN = 0.85
# Of the objective of the first token, what may pass before its prompt is computed; and what each second counts beyond.
WAIT_SHARE = 0.5
LATE = 10.0
# What a second counts that a stream waits within its objective, and in which its tokens come.
WITHIN = 0.1
# The other role costs so much: a prompt at most as much as it takes twice.
AWAY_S = 0.1
# What a second counts that others of a replica lose by a stream that joins them: they have got some of their tokens.
OTHERS = 0.2
# A replica has so much of another's streams where it is no longer one for prompts; and prompts of both take so much of
# a replica's time where they had better have one for themselves.
PART, FULL = 0.25, 0.6
_MOST_BUSY = 0.95


@dataclass(frozen=True, slots=True)
class _Card:
    """A replica as both kinds of candidate have it. busy_s: of prompts, of the last PROMPT_SHARE_S and waiting."""

    num_rows: int
    busy_s: float
    room_s: float
    row_step_s: float
    one_row_s: float

    @classmethod
    def of(cls, found: DecodeCandidate | PrefillCandidate, rules: RoutingRules, tokens_per_s: float) -> _Card:
        """tokens_per_s: where it is not known of it."""
        busy_s = found.prompt_share * PROMPT_SHARE_S + found.queued_tokens / (found.tokens_per_s or tokens_per_s)
        room_s = PROMPT_SHARE_S * (1.0 - found.row_step_s / (MARGIN * rules.tpot_s))
        one_row_s = (found.row_step_s - found.least_row_step_s) / max(1, found.num_rows)
        return cls(found.num_rows, busy_s, room_s, found.row_step_s, one_row_s)

    def stalled_s(self, prompt_s: float) -> float:
        """What its streams lose, all together, by a prompt that takes so long."""
        late_s = max(0.0, self.busy_s + prompt_s - max(self.room_s, self.busy_s))
        return self.num_rows * (late_s + WITHIN * prompt_s)

    def is_late(self, prompt_s: float) -> bool:
        """Whether its streams' tokens come too late in the mean for a prompt that takes so long."""
        return self.num_rows > 0 and self.busy_s + prompt_s > self.room_s

    def slow_s(self, num_tokens: int, rules: RoutingRules) -> float:
        """What a stream of so many tokens loses that joins now, and others by it, if they are of like length."""
        objective_s, share = MARGIN * rules.tpot_s, min(_MOST_BUSY, self.busy_s / PROMPT_SHARE_S)
        before_s = self.row_step_s / (1.0 - share)
        gap_s = (self.row_step_s + self.one_row_s) / (1.0 - share)
        late_s = max(0.0, gap_s - objective_s)
        others_s = OTHERS * self.num_rows * (late_s - max(0.0, before_s - objective_s))
        return num_tokens * (late_s + others_s + WITHIN * gap_s)


def _first_token_s(wait_s: float, prompt_s: float, rules: RoutingRules) -> float:
    """prompt_s: what it takes by itself, which no replica can change: a long one may wait for twice as long."""
    return wait_s + prompt_s + LATE * max(0.0, wait_s - max(WAIT_SHARE * rules.ttft_s, 2.0 * prompt_s))


def _prompt_s(
    need: Need,
    found: DecodeCandidate | PrefillCandidate,
    rules: RoutingRules,
    known_rate: float,
    read_s: float = 0.0,
) -> float:
    """What it costs that this replica computes the prompt, read_s until its KV is where it is wanted."""
    tokens_per_s = found.tokens_per_s or known_rate
    prompt_s = need.uncached_at(found.replica_id) / tokens_per_s
    card = _Card.of(found, rules, known_rate)
    wait_s = found.queued_tokens / tokens_per_s + read_s
    away_s = 0.0 if _is_at_home(found) else min(AWAY_S, 2.0 * prompt_s)
    return _first_token_s(wait_s, prompt_s, rules) + card.stalled_s(prompt_s) + away_s


def _stays(need: Need, decode: DecodeCandidate, prefill: PrefillCandidate, rules: RoutingRules, rate: float) -> bool:
    """Whether the prompt is computed where its tokens are, whatever it costs there by itself: both have streams that it
    makes late, and prompts do not fill a replica. Then it is all one where: streams follow, to where there are fewer
    prompts. But KV that moves takes time of both, and prompts apart from one another hide more of the reading of
    weights."""
    here, there = (_Card.of(found, rules, rate) for found in (decode, prefill))
    prompt_s = need.uncached_at(decode.replica_id) / (decode.tokens_per_s or rate)
    both_have_streams = there.num_rows >= PART * here.num_rows
    are_few_prompts = here.busy_s + there.busy_s <= FULL * PROMPT_SHARE_S
    return both_have_streams and are_few_prompts and here.is_late(prompt_s) and there.is_late(prompt_s)


def _is_at_home(found: DecodeCandidate | PrefillCandidate) -> bool:
    """Whether to compute prompts is its role."""
    return found.is_away == isinstance(found, DecodeCandidate)


def _rate(*candidates: DecodeCandidate | PrefillCandidate) -> float:
    """How fast they compute prompts, in the mean of those of which it is known: for the others."""
    rates = [found.tokens_per_s for found in candidates if found.tokens_per_s > 0.0]
    return sum(rates) / len(rates) if rates else GUESSED_TOKENS_PER_S


def _read_s(need: Need, decode: DecodeCandidate, pair: Pair) -> float:
    """The KV's way from one replica to another."""
    token_s = decode.block_bytes / (need.block_size * pair.bytes_per_s) if pair.bytes_per_s else 0.0
    return need.uncached_at(decode.replica_id) * token_s + MESSAGES_S + pair.penalty_s + need.num_lost * LOST_S


def decode_costs(
    need: Need,
    candidates: Sequence[DecodeCandidate],
    rules: RoutingRules,
    prefills: Sequence[PrefillCandidate],
    pairs: Pairs,
) -> Costs:
    """One that admits it at once, if any does; of these the one where it and others lose the least, its prompt computed
    where that costs least. Equal ones by the room that they have."""
    known_rate = _rate(*candidates, *prefills)
    sources = sorted([(_prompt_s(need, p, rules, known_rate), p) for p in prefills], key=_cost)

    def cost_s(found: DecodeCandidate) -> float:
        card = _Card.of(found, rules, known_rate)
        ways_s = [_prompt_s(need, found, rules, known_rate)]
        for source_s, source in sources:
            if source.replica_id != found.replica_id and source.fingerprint == found.fingerprint:
                if not _stays(need, found, source, rules, known_rate):
                    ways_s.append(source_s + _read_s(need, found, pairs(found.replica_id, source.replica_id)))
                break
        num_tokens = found.expected_rows(need) * need.num_choices
        return min(ways_s) + card.slow_s(num_tokens, rules) + AWAY_S * found.is_away

    return [(found.must_wait(need), cost_s(found), -found.free_blocks, found.num_in_flight) for found in candidates]


def _cost(costed: tuple[float, PrefillCandidate]) -> float:
    return costed[0]


def prefill_costs(
    need: Need, candidates: Sequence[PrefillCandidate], decode: DecodeCandidate, rules: RoutingRules, pairs: Pairs
) -> Costs:
    known_rate = _rate(decode, *candidates)
    return [
        (
            _prompt_s(
                need, found, rules, known_rate, _read_s(need, decode, pairs(decode.replica_id, found.replica_id))
            ),
            found.queued_tokens,
        )
        for found in candidates
    ]


def why_local(
    need: Need, prefill: PrefillCandidate, decode: DecodeCandidate, rules: RoutingRules, pair: Pair
) -> RouteKind | None:
    known_rate = _rate(decode, prefill)
    there_s = _prompt_s(need, prefill, rules, known_rate, _read_s(need, decode, pair))
    here_s = _prompt_s(need, decode, rules, known_rate)
    if there_s <= here_s and not _stays(need, decode, prefill, rules, known_rate):
        return None
    return RouteKind.FAILED_PAIR if need.num_lost or pair.penalty_s else RouteKind.MIXED


ROLES_BY_COST = RoutingPolicy(decode_costs=decode_costs, prefill_costs=prefill_costs, why_local=why_local)
