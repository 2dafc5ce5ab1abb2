"""Tells of pairs that prompts go around, as they are slow or have failed: a log line a minute and pair."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.policies.routing_policy import Route, RouteKind
from cluster.routing.pair_table import PairTable

logger = logging.getLogger(__name__)

_TELL_EVERY_S = 60.0
_OF_THE_PAIR = (RouteKind.SLOW_PAIR, RouteKind.FAILED_PAIR)


@dataclass(slots=True)
class _Told:
    at_s: float
    num_prompts: int = 0  # since then


class AvoidedPairs:
    """One for each router. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[tuple[str, str], _Told] = {}

    def note(self, route: Route, pairs: PairTable) -> None:
        """A prompt takes this route. Mutates."""
        if route.avoided_id is None or route.kind not in _OF_THE_PAIR:
            return
        ids, now_s = (route.decode_id, route.avoided_id), self._clock()
        told = self._told.get(ids)
        if told is not None and now_s - told.at_s < _TELL_EVERY_S:
            told.num_prompts += 1
            return
        self._told = {of: it for of, it in self._told.items() if now_s - it.at_s < _TELL_EVERY_S}
        self._told[ids] = _Told(now_s)
        pair = pairs.of(*ids)
        extra = {
            "event": "pair_avoided",
            "why": route.kind,
            "decode": route.decode_id,
            "prefill": route.avoided_id,
            "gb_per_s": round(pair.bytes_per_s / 1e9, 3),
            "penalty_s": round(pair.penalty_s, 1),
            "num_before": told.num_prompts if told is not None else 0,
        }
        logger.warning("decode computes prompts itself rather than read their KV from this replica", extra=extra)
