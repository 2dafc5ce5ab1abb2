"""What one router knows of pairs of a decode and a prefill replica: how fast the one reads from the other, what of ours
is on that way, and how its handoffs have gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from cluster.policies.routing_policy import Pair, Route, unknown_pairs
from cluster.routing.pair_health import PairHealth

# A rate that nothing has confirmed for so long counts twice as high, and so on: a pair that was too slow to be used is
# tried again, by one prompt in some minutes. What is on its way there counts, so that others do not follow at once.
_RATE_DOUBLES_S = 60.0
_MOST_DOUBLINGS = 10.0
# KV that is ready, on a way by which none has come for so long, is as much as lost: others do not follow it. A transfer
# takes a second where it is slow; what is slower by measurement has its price already.
_SILENT_S = 5.0
_FRESH_S = 0.5  # how old a figure that changes with time may be


@dataclass(slots=True)
class _PairState:
    bytes_per_s: float = 0.0
    confirmed_s: float = 0.0
    coming_tokens: int = 0
    num_coming: int = 0
    num_reading: int = 0  # of these, whose KV is ready
    silent_since_s: float = 0.0  # while there are any: since when none has come
    health: PairHealth = field(default_factory=PairHealth)
    pair: Pair = field(default_factory=Pair)  # as policies see it, until then
    until_s: float = 0.0


class PairTable:
    """On the router's event loop. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._states: dict[tuple[str, str], _PairState] = {}  # of pairs of which anything is known

    def of(self, decode_id: str, prefill_id: str) -> Pair:
        """As it is now."""
        state = self._states.get((decode_id, prefill_id))
        if state is None:
            return unknown_pairs(decode_id, prefill_id)
        now_s = self._clock()
        if now_s >= state.until_s:
            state.pair = _pair(state, now_s)
            state.until_s = now_s + _FRESH_S
        return state.pair

    def measured(self, decode_id: str, bytes_per_s: Iterable[tuple[str, float]]) -> None:
        """So fast this decode replica reads from these prefill replicas now: the one place where rates come from.
        Mutates. To be told the same again confirms nothing: replicas say what they know again and again."""
        for prefill_id, rate in bytes_per_s:
            state = self._state(decode_id, prefill_id)
            if rate != state.bytes_per_s:
                state.bytes_per_s, state.confirmed_s, state.until_s = rate, self._clock(), 0.0

    def sent(self, route: Route, num_tokens: int) -> None:
        """A prompt takes this route. Mutates; so do the others."""
        if route.prefill_id is None:
            return
        state = self._state(route.decode_id, route.prefill_id)
        state.coming_tokens += num_tokens
        state.num_coming += 1
        state.until_s = 0.0

    def reading(self, route: Route) -> None:
        """Its KV is ready: decode reads it from now on. Mutates."""
        if route.prefill_id is not None:
            state = self._state(route.decode_id, route.prefill_id)
            if not state.num_reading:
                state.silent_since_s = self._clock()
            state.num_reading += 1

    def arrived(self, route: Route, num_tokens: int, was_reading: bool = False) -> None:
        """Its KV is at decode, or never will be. Once for each `sent`. was_reading: and for each `reading`."""
        if route.prefill_id is None:
            return
        state = self._state(route.decode_id, route.prefill_id)
        state.num_reading -= was_reading
        state.coming_tokens -= num_tokens
        state.num_coming -= 1
        state.until_s = 0.0
        assert state.num_coming >= 0, "arrived twice"

    def worked(self, route: Route) -> None:
        """A handoff has."""
        if route.prefill_id is not None:
            state, now_s = self._state(route.decode_id, route.prefill_id), self._clock()
            state.health, state.confirmed_s, state.until_s = state.health.worked(now_s), now_s, 0.0
            state.silent_since_s = now_s

    def failed(self, route: Route) -> None:
        """A handoff has, and no replica is known to be at fault."""
        if route.prefill_id is not None:
            state = self._state(route.decode_id, route.prefill_id)
            state.health, state.until_s = state.health.failed(self._clock()), 0.0

    def left(self, present: Collection[str]) -> None:
        """These replicas there are now: pairs of others are forgotten, once nothing of ours is on its way there."""
        known = self._states.items()
        gone = [ids for ids, state in known if not state.num_coming and not all(name in present for name in ids)]
        for ids in gone:
            del self._states[ids]

    def _state(self, decode_id: str, prefill_id: str) -> _PairState:
        state = self._states.get((decode_id, prefill_id))
        if state is None:
            state = self._states[decode_id, prefill_id] = _PairState()
        return state


def _pair(state: _PairState, now_s: float) -> Pair:
    doublings = min(_MOST_DOUBLINGS, (now_s - state.confirmed_s) / _RATE_DOUBLES_S)
    silent_s = now_s - state.silent_since_s if state.num_reading else 0.0
    penalty_s = max(state.health.cost_s(now_s, state.num_coming > 0), silent_s if silent_s >= _SILENT_S else 0.0)
    return Pair(state.bytes_per_s * 2.0**doublings, state.coming_tokens, penalty_s)
