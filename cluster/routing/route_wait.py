"""Where an attempt goes, as soon as there is anybody for it: waits for replicas that replace those that were lost, and
for those that have stopped answering."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from cluster.policies.routing_policy import Route, Unavailable
from cluster.routing.attempt_failed import AttemptHistory
from cluster.routing.cold_start import ColdStart
from cluster.routing.generation import Leg
from cluster.routing.route_finder import RouteFinder

_RECOVERY_POLL_S = 0.1


class RouteWait:
    """One for each router, on its event loop."""

    def __init__(
        self, routes: RouteFinder, cold_start: ColdStart, recovers_until_s: Callable[[str, float], float]
    ) -> None:
        """recovers_until_s: as AdmissionWaits has it."""
        self._routes, self._cold_start, self._recovers_until_s = routes, cold_start, recovers_until_s

    async def for_first(self, leg: Leg, deadline_s: float, max_held: int | None = None) -> None:
        """While a pool that it needs is empty as it may be. Raises ApiError; the rest as of ColdStart."""
        with _counted(leg) as waited_s:
            await self._cold_start.wait(self._routes.need(leg), max_held, deadline_s, waited_s)

    async def route(self, leg: Leg, past: AttemptHistory, deadline_s: float, max_held: int | None = None) -> Route:
        """Where it goes. Who waits: of a pool that has nobody for it what its request has begun, and new ones while
        replicas are on their way there, or may answer again. Raises ApiError. deadline_s, max_held: as ColdStart has
        them."""
        decided = self._routes.decide(leg, past)
        if isinstance(decided, Unavailable):
            if leg.has_begun:
                await self._recover(leg, past, deadline_s)
            else:
                lacks, need = partial(self._routes.lacking, leg, past), self._routes.need(leg)
                with _counted(leg) as waited_s:
                    await self._cold_start.wait_for_others(need, lacks, max_held, deadline_s, waited_s)
            decided = self._routes.decide(leg, past)
        return self._routes.checked(decided, leg)

    async def _recover(self, leg: Leg, past: AttemptHistory, deadline_s: float) -> None:
        began_s = time.monotonic()
        while (pool := self._routes.lacking(leg, past)) is not None:
            if time.monotonic() >= min(deadline_s, self._recovers_until_s(pool, began_s)):
                break
            await asyncio.sleep(_RECOVERY_POLL_S)


@contextmanager
def _counted(leg: Leg) -> Iterator[float]:
    """How long it has waited before, if that counts. Mutates: afterwards it has waited for what is within, too."""
    began_s = time.monotonic()
    try:
        yield 0.0 if leg.has_begun else leg.waited_s
    finally:
        leg.waited_s += time.monotonic() - began_s
