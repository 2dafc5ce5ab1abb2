"""Where a request goes: pure functions of a snapshot. What they decide is applied by `cluster.routing.router`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from replicas.model_identity import model_of
from scheduler.admission import LATER_STEPS
from scheduler.memory_budget import blocks_for_generation, num_blocks_for


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of the pools. model: the only one (`model_of`) that may answer it; empty: any."""

    prompt_tokens: int
    max_tokens: int
    num_choices: int
    block_size: int
    is_search: bool = False  # a beam search
    model: str = ""

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


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """One decode replica as this router knows it.

    free_blocks: what a newcomer may use there at every step to come, by the replica's own projection in its last
    frame, less what this router has sent since and not yet heard admitted; later_free_blocks: the same from the steps
    on that are LATER_STEPS away. expected_tokens: what a choice is taken to generate (0: its max_tokens).
    num_in_flight: this router's own requests there. num_queued: anybody's that waited there for memory or a slot, by
    its last frame; whoever comes now waits too. step_s: its moving average. fingerprint: who shares it can exchange KV.
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

    @property
    def model(self) -> str:
        return model_of(self.fingerprint)

    def must_wait(self, need: Need) -> bool:
        """Whether a request that comes now is not admitted at once."""
        return self.num_queued > 0 or not self._has_room(need)

    def projected_blocks(self, need: Need) -> int:
        """The most that it will use there if it is as long as is expected."""
        return need.blocks_after(self._num_rows(need))

    def _has_room(self, need: Need) -> bool:
        """By the projection: what it uses at the end of each stretch of steps is free from its beginning on."""
        num_rows = self._num_rows(need)
        rooms = (self.free_blocks, *self.later_free_blocks)
        ends = (*LATER_STEPS[: len(self.later_free_blocks)], num_rows)
        return all(need.blocks_after(min(num_rows, end)) <= room for room, end in zip(rooms, ends, strict=True))

    def _num_rows(self, need: Need) -> int:
        if need.is_search:
            return need.max_tokens - 1  # decode promises it all that it can ever need
        return min(need.max_tokens, self.expected_tokens or need.max_tokens) - 1


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """One prefill replica. queued_tokens: prompt tokens not yet computed, this router's own included.

    tokens_per_s: how fast it computes them, measured; 0.0: not known yet.
    """

    replica_id: str
    total_blocks: int
    queued_tokens: int
    tokens_per_s: float = 0.0
    node_id: str = ""
    fingerprint: str = ""


class RouteKind(StrEnum):
    REMOTE = "remote"  # prefill pool, then handoff
    LOCAL = "local"  # the decode replica prefills: colocated, or a short prompt
    FALLBACK = "fallback_aggregated"  # the decode replica prefills because no prefill replica that is like it lives


@dataclass(frozen=True, slots=True)
class Route:
    """A decision. must_wait: no decode replica has room now, so the request will queue there.

    decode_blocks: the most that it will use there by projection. model: who answers.
    """

    kind: RouteKind
    decode_id: str
    prefill_id: str | None
    must_wait: bool
    decode_blocks: int
    model: str = ""


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


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """From the config. has_prefill_pool is false when colocated.

    other_node_penalty: a prompt counts so many times more at a prefill replica on another node than decode's.
    """

    has_prefill_pool: bool
    local_prefill_max_tokens: int
    fallback_to_decode: bool
    other_node_penalty: float = 0.0


def choose_route(
    need: Need,
    decodes: Sequence[DecodeCandidate],
    prefills: Sequence[PrefillCandidate],
    rules: RoutingRules,
    excluded: Collection[str] = (),
) -> Route | NeverFits | Unavailable:
    """The pair for one request. `excluded` replicas (they failed it before) are only taken when there is no other.

    Only replicas of one fingerprint make a pair. While the pools are updated from one model to another there may be
    none: then decode computes the prompt itself, whatever the rules say of a pool without replicas.
    """
    able = [decode for decode in decodes if decode.model == need.model] if need.model else decodes
    is_local = not rules.has_prefill_pool or need.prompt_tokens <= rules.local_prefill_max_tokens
    decode = choose_decode(need, able, excluded) if is_local else _choose_paired(need, able, prefills, excluded)
    if not isinstance(decode, DecodeCandidate):
        return decode

    def route(kind: RouteKind, prefill_id: str | None = None) -> Route:
        blocks = decode.projected_blocks(need)
        return Route(kind, decode.replica_id, prefill_id, decode.must_wait(need), blocks, decode.model)

    if is_local:
        return route(RouteKind.LOCAL)
    alike = [prefill for prefill in prefills if prefill.fingerprint == decode.fingerprint]
    prefill = choose_prefill(need, alike, excluded, decode.node_id, rules.other_node_penalty)
    if isinstance(prefill, PrefillCandidate):
        return route(RouteKind.REMOTE, prefill.replica_id)
    if isinstance(prefill, Unavailable) and (rules.fallback_to_decode or prefills):
        return route(RouteKind.FALLBACK)
    return prefill


def _choose_paired(
    need: Need, decodes: Sequence[DecodeCandidate], prefills: Sequence[PrefillCandidate], excluded: Collection[str]
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
        decided = choose_decode(need, [decode for decode in decodes if rank(decode) <= worst], excluded)
        if isinstance(decided, DecodeCandidate):
            return decided
    return decided


def choose_decode(
    need: Need, candidates: Sequence[DecodeCandidate], excluded: Collection[str] = ()
) -> DecodeCandidate | NeverFits | Unavailable:
    """One that admits it at once, if any does; of these the one with the most room by projection, then the fewest of
    our requests, then the quickest steps.
    """

    def cost(candidate: DecodeCandidate) -> tuple[Any, ...]:
        return -candidate.free_blocks, candidate.num_in_flight, candidate.step_s

    def cost_of_waiting(candidate: DecodeCandidate) -> tuple[Any, ...]:
        return candidate.must_wait(need), *cost(candidate)

    # Mostly whoever has the most room admits it at once: then nobody else need be asked whether he would.
    roomiest = _choose("decode", need.decode_blocks, candidates, excluded, cost)
    if not isinstance(roomiest, DecodeCandidate) or not roomiest.must_wait(need):
        return roomiest
    return _choose("decode", need.decode_blocks, candidates, excluded, cost_of_waiting)


def choose_prefill(
    need: Need,
    candidates: Sequence[PrefillCandidate],
    excluded: Collection[str] = (),
    decode_node_id: str = "",
    other_node_penalty: float = 0.0,
) -> PrefillCandidate | NeverFits | Unavailable:
    """The replica at which the prompt is computed soonest: what waits there and itself, at the rate measured there; on
    another node than decode's with the penalty, which stands for the longer way of its KV.

    Where no rate is known yet it is taken to be the mean of the others'; then whoever has the fewest tokens waiting.
    """
    known = [candidate.tokens_per_s for candidate in candidates if candidate.tokens_per_s > 0.0]
    typical = sum(known) / len(known) if known else 1.0

    def cost(candidate: PrefillCandidate) -> tuple[object, ...]:
        penalty = other_node_penalty if candidate.node_id != decode_node_id else 0.0
        num_tokens = candidate.queued_tokens + need.prompt_tokens * (1.0 + penalty)
        return num_tokens / (candidate.tokens_per_s or typical), candidate.queued_tokens

    return _choose("prefill", need.prefill_blocks, candidates, excluded, cost)


class _Candidate(Protocol):
    @property
    def replica_id(self) -> str: ...

    @property
    def total_blocks(self) -> int: ...


_CandidateT = TypeVar("_CandidateT", bound=_Candidate)


def _choose(
    pool: str,
    needed_blocks: int,
    candidates: Sequence[_CandidateT],
    excluded: Collection[str],
    cost: Callable[[_CandidateT], tuple[Any, ...]],
) -> _CandidateT | NeverFits | Unavailable:
    """The cheapest of those large enough that have not failed, or, without one, that have. Equal ones: by name."""
    if not candidates:
        return Unavailable(pool)
    fitting = [c for c in candidates if c.total_blocks >= needed_blocks]
    if not fitting:
        return NeverFits(pool, needed_blocks, max(c.total_blocks for c in candidates))
    fresh = [c for c in fitting if c.replica_id not in excluded] or fitting
    return min(fresh, key=lambda c: (*cost(c), c.replica_id))
