"""What is known and what is decided of where a request goes, and what a routing policy is.

A policy is a pure function of a snapshot. `cluster.routing.pairing` asks it, `cluster.routing.router` applies what was
decided. A new one is a new file in `cluster/policies` and a line in `policy_table` there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeVar

from cluster.policies.routing_rules import RoutingRules as RoutingRules
from replicas.model_identity import model_of
from scheduler.admission import LATER_STEPS
from scheduler.memory_budget import blocks_for_generation, num_blocks_for


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of the pools. model: the only one (`model_of`) that may answer it; empty: any.

    num_lost: how often it has failed on its way over a prefill replica. cached: how many tokens of its prompt each
    replica is expected to have, by replica id; of those that have any. has_begun: it goes before those that wait.
    is_suspect: it may be what replicas have died of.
    """

    prompt_tokens: int
    max_tokens: int
    num_choices: int
    block_size: int
    is_search: bool = False  # a beam search
    model: str = ""
    num_lost: int = 0
    cached: Mapping[str, int] = field(default_factory=dict)
    has_begun: bool = False
    is_suspect: bool = False

    def cached_at(self, replica_id: str) -> int:
        """Tokens of its prompt that this replica is expected to have: never all of them."""
        return self.cached.get(replica_id, 0)

    def uncached_at(self, replica_id: str) -> int:
        """The others: what it would compute, or what would be read to there."""
        return self.prompt_tokens - self.cached.get(replica_id, 0)

    @property
    def fewest_uncached(self) -> int:
        """What is left to compute where most of it is."""
        return self.prompt_tokens - max(self.cached.values(), default=0)

    @property
    def prefill_blocks(self) -> int:
        return num_blocks_for(self.prompt_tokens, self.block_size)

    @property
    def decode_blocks(self) -> int:
        """The most it can ever use there."""
        return self.blocks_after(self.max_tokens - 1)

    def blocks_after(self, num_rows: int) -> int:
        """What it uses at decode when each choice has taken so many rows: one of them writes one token's KV."""
        num_tokens = min(num_rows + 1, self.max_tokens)
        return blocks_for_generation(self.prompt_tokens, num_tokens, self.num_choices, self.block_size)


class DecodeCandidate(NamedTuple):
    """One decode replica as this router knows it. A tuple, as are the others: made for each decision, and a frozen
    dataclass takes three times as long.

    free_blocks: what a newcomer may use there at every step to come, by the replica's own projection in its last
    frame, less what this router has sent since and not yet heard admitted; later_free_blocks: the same from the steps
    on that are LATER_STEPS away. expected_tokens: what a choice is taken to generate (0: its max_tokens).
    num_in_flight: this router's own requests there. num_queued: anybody's that waited there for memory or a slot, by
    its last frame; whoever comes now waits too. step_s: its moving average. fingerprint: who shares it can exchange KV.
    num_rows: streams there, anybody's, those included whose prompt is yet to come. queued_tokens: of prompts that it is
    to compute itself, this router's own included; tokens_per_s: how fast, 0.0: not known yet. step_tokens: the most
    in a step, rows included; 0: no limit. block_bytes: of KV. max_rows: the most streams at once; 0: no limit.
    row_step_s, prompt_share: as EngineLoad has them, the latter as of now; least_row_step_s: of a step with next to
    nobody in it. is_away: it is of the prefill pool, and may also generate.
    """

    replica_id: str
    total_blocks: int
    free_blocks: int
    num_in_flight: int
    num_queued: int = 0
    later_free_blocks: tuple[int, ...] = ()
    expected_tokens: int = 0
    step_s: float = 0.0
    node_id: str = ""
    fingerprint: str = ""
    num_rows: int = 0
    queued_tokens: int = 0
    tokens_per_s: float = 0.0
    step_tokens: int = 0
    block_bytes: int = 0
    max_rows: int = 0
    row_step_s: float = 0.0
    least_row_step_s: float = 0.0
    prompt_share: float = 0.0
    is_away: bool = False

    @property
    def model(self) -> str:
        return model_of(self.fingerprint)

    def must_wait(self, need: Need) -> bool:
        """Whether a request that comes now is not admitted at once: others wait, or it has no slot or no memory."""
        has_no_slot = 0 < self.max_rows < self.num_rows + need.num_choices
        has_others = self.num_queued > 0 and not need.has_begun
        return has_others or has_no_slot or not self._has_room(need)

    def projected_blocks(self, need: Need) -> int:
        """The most that it will use there if it is as long as is expected."""
        return need.blocks_after(self._num_rows(need))

    def expected_rows(self, need: Need) -> int:
        """Steps that it takes there if it is as long as is expected: one token less than that, or one."""
        return max(1, self._num_rows(need))

    def _has_room(self, need: Need) -> bool:
        """By the projection: what it uses at the end of each stretch of steps is free from its beginning on."""
        num_rows = self._num_rows(need)
        rooms = (self.free_blocks, *self.later_free_blocks)
        if need.blocks_after(num_rows) <= min(rooms):  # mostly, and then it fits all along
            return True
        ends = (*LATER_STEPS[: len(self.later_free_blocks)], num_rows)
        return all(need.blocks_after(min(num_rows, end)) <= room for room, end in zip(rooms, ends, strict=True))

    def _num_rows(self, need: Need) -> int:
        if need.is_search:
            return need.max_tokens - 1  # decode promises it all that it can ever need
        return min(need.max_tokens, self.expected_tokens or need.max_tokens) - 1


class PrefillCandidate(NamedTuple):
    """One prefill replica. queued_tokens: prompt tokens not yet computed, this router's own included.

    tokens_per_s: how fast it computes them, measured; 0.0: not known yet. num_rows, row_step_s, prompt_share: as a
    DecodeCandidate has them, of one that may also generate. is_away: it is of the decode pool, and may also compute
    prompts for others.
    """

    replica_id: str
    total_blocks: int
    queued_tokens: int
    tokens_per_s: float = 0.0
    node_id: str = ""
    fingerprint: str = ""
    num_rows: int = 0
    row_step_s: float = 0.0
    least_row_step_s: float = 0.0
    prompt_share: float = 0.0
    is_away: bool = False


class Pair(NamedTuple):
    """What this router knows of a decode replica's reads from a prefill replica.

    bytes_per_s: measured; 0.0: not known yet. coming_tokens: of this router's prompts whose KV is to go that way and
    has not arrived. penalty_s: what it counts that handoffs have failed there lately.
    """

    bytes_per_s: float = 0.0
    coming_tokens: int = 0
    penalty_s: float = 0.0


Pairs = Callable[[str, str], Pair]  # of a decode and a prefill replica, by their ids

_UNKNOWN_PAIR = Pair()


def unknown_pairs(decode_id: str, prefill_id: str) -> Pair:
    """Where nothing is known of any pair."""
    return _UNKNOWN_PAIR


class RouteKind(StrEnum):
    """Who computes the prompt, and why: the values of the label `result` of splitserve_router_decisions_total."""

    REMOTE = "remote"  # prefill pool, then handoff
    LOCAL = "local"  # the decode replica: colocated, or a short prompt, or what it does not have of it is short
    FALLBACK = "fallback_aggregated"  # the decode replica, because no prefill replica that is like it lives
    CACHED = "local_cached"  # the decode replica, because it has so much of it that the rest costs less time there
    MIXED = "local_mixed"  # the replica that generates, which has time for it within the objectives
    # The decode replica, because that costs less time:
    BUSY_PREFILL = "local_busy_prefill"  # than what waits at the prefill pool
    SLOW_PAIR = "local_slow_pair"  # than the KV's way from the prefill replica
    FAILED_PAIR = "local_failed_pair"  # than to fail there once more
    # The decode replica, so that there is only one that can die of it, and it is known whether it had begun.
    SUSPECT = "local_suspect"
    MOVED = "moved"  # nobody: it goes on where another decode replica has stopped (counted as a migration)


@dataclass(frozen=True, slots=True)
class Route:
    """A decision. must_wait: no decode replica has room now, so the request will queue there.

    decode_blocks: the most that it will use there by projection. model: who answers. avoided_id: the prefill replica
    that would have been the cheapest, where it was dearer than decode itself. cached_tokens: of the prompt, that who
    computes it is expected to have. kept_tokens: likewise, the decode replica.
    """

    kind: RouteKind
    decode_id: str
    prefill_id: str | None
    must_wait: bool
    decode_blocks: int
    model: str = ""
    avoided_id: str | None = None
    cached_tokens: int = 0
    kept_tokens: int = 0


@dataclass(frozen=True, slots=True)
class NeverFits:
    """No replica of the pool is large enough."""

    pool: str
    needed_blocks: int
    largest_pool_blocks: int


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A pool that is needed has no replica now."""

    pool: str


Costs = Sequence[tuple[float, ...]]


def never_local(
    need: Need, prefill: PrefillCandidate, decode: DecodeCandidate, rules: RoutingRules, pair: Pair
) -> RouteKind | None:
    """Of a policy that always uses the prefill pool."""
    return None


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """What each candidate costs, in the order of the candidates. The cheapest is taken; of equal ones the first by
    name.

    The functions are pure, and are asked only where there is a choice: of replicas that may be taken at all, each
    large enough for the request. Who these are is no policy's affair (`cluster.routing.pairing`). They run once a
    request, on the router's event loop.
    """

    # With the prefill replicas that it may be paired with: none where decode computes the prompt itself.
    decode_costs: Callable[[Need, Sequence[DecodeCandidate], RoutingRules, Sequence[PrefillCandidate], Pairs], Costs]
    # The decode replica has been chosen: it reads what this one has computed.
    prefill_costs: Callable[[Need, Sequence[PrefillCandidate], DecodeCandidate, RoutingRules, Pairs], Costs]
    # Both have been chosen: why decode computes the prompt nevertheless, or None. Asked with local_by_cost only.
    why_local: Callable[[Need, PrefillCandidate, DecodeCandidate, RoutingRules, Pair], RouteKind | None] = never_local


class _Candidate(Protocol):
    @property
    def replica_id(self) -> str: ...

    @property
    def total_blocks(self) -> int: ...


CandidateT = TypeVar("CandidateT", bound=_Candidate)


def cheapest(candidates: Sequence[CandidateT], costs: Costs) -> CandidateT:
    """Of equally cheap ones the first by name. Raises ValueError for another number of costs than of candidates."""
    if len(costs) != len(candidates):
        raise ValueError(f"the routing policy gave {len(costs)} costs for {len(candidates)} replicas")
    least = min(costs)
    if costs.count(least) == 1:
        return candidates[costs.index(least)]
    return min([c for c, cost in zip(candidates, costs, strict=True) if cost == least], key=attrgetter("replica_id"))
