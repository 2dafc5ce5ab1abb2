"""Where a request goes: pure functions of a snapshot. What they decide is applied by `cluster.router`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """One decode replica as this router knows it.

    free_blocks: not promised to anyone by its last frame, less what this router has sent since and not yet
    heard admitted. num_in_flight: this router's own requests there. num_queued: anybody's that waited there for
    memory or a slot, by its last frame; whoever comes now waits too.
    """

    replica_id: str
    total_blocks: int
    free_blocks: int
    num_in_flight: int
    num_queued: int = 0

    def must_wait(self, needed_blocks: int) -> bool:
        """Whether a request that comes now is not admitted at once."""
        return self.free_blocks < needed_blocks or self.num_queued > 0


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """One prefill replica. queued_tokens: prompt tokens not yet computed, this router's own included."""

    replica_id: str
    total_blocks: int
    queued_tokens: int


class RouteKind(StrEnum):
    REMOTE = "remote"  # prefill pool, then handoff
    LOCAL = "local"  # the decode replica prefills: colocated, or a short prompt
    FALLBACK = "fallback_aggregated"  # the decode replica prefills because no prefill replica lives


@dataclass(frozen=True, slots=True)
class Route:
    """A decision. must_wait: no decode replica has room now, so the request will queue there."""

    kind: RouteKind
    decode_id: str
    prefill_id: str | None
    must_wait: bool


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
class Need:
    """What a request needs of each pool."""

    decode_blocks: int
    prefill_blocks: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """From the config. has_prefill_pool is false when colocated."""

    has_prefill_pool: bool
    local_prefill_max_tokens: int
    fallback_to_decode: bool


def choose_route(
    need: Need,
    decodes: Sequence[DecodeCandidate],
    prefills: Sequence[PrefillCandidate],
    rules: RoutingRules,
    excluded: Collection[str] = (),
) -> Route | NeverFits | Unavailable:
    """The pair for one request. `excluded` replicas (they failed it before) are only taken when there is no other."""
    decode = choose_decode(need.decode_blocks, decodes, excluded)
    if not isinstance(decode, DecodeCandidate):
        return decode
    must_wait = decode.must_wait(need.decode_blocks)
    if not rules.has_prefill_pool or need.prompt_tokens <= rules.local_prefill_max_tokens:
        return Route(RouteKind.LOCAL, decode.replica_id, None, must_wait)
    prefill = choose_prefill(need.prefill_blocks, prefills, excluded)
    if isinstance(prefill, PrefillCandidate):
        return Route(RouteKind.REMOTE, decode.replica_id, prefill.replica_id, must_wait)
    if isinstance(prefill, Unavailable) and rules.fallback_to_decode:
        return Route(RouteKind.FALLBACK, decode.replica_id, None, must_wait)
    return prefill


def choose_decode(
    needed_blocks: int, candidates: Sequence[DecodeCandidate], excluded: Collection[str] = ()
) -> DecodeCandidate | NeverFits | Unavailable:
    """One that admits it at once, if any does; of these the one with the most room, then the fewest of our requests."""
    if not candidates:
        return Unavailable("decode")
    fitting = [c for c in candidates if c.total_blocks >= needed_blocks]
    if not fitting:
        return NeverFits("decode", needed_blocks, max(c.total_blocks for c in candidates))
    fresh = [c for c in fitting if c.replica_id not in excluded] or fitting
    return max(fresh, key=lambda c: (not c.must_wait(needed_blocks), c.free_blocks, -c.num_in_flight, c.replica_id))


def choose_prefill(
    needed_blocks: int, candidates: Sequence[PrefillCandidate], excluded: Collection[str] = ()
) -> PrefillCandidate | NeverFits | Unavailable:
    """The replica with the fewest prompt tokens waiting."""
    if not candidates:
        return Unavailable("prefill")
    fitting = [c for c in candidates if c.total_blocks >= needed_blocks]
    if not fitting:
        return NeverFits("prefill", needed_blocks, max(c.total_blocks for c in candidates))
    fresh = [c for c in fitting if c.replica_id not in excluded] or fitting
    return min(fresh, key=lambda c: (c.queued_tokens, c.replica_id))
