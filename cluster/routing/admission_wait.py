"""One attempt's wait for a decode replica to admit it: how long, and to where it is called meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.policies.routing_policy import NeverFits, Route, Unavailable
from cluster.routing.detached_tasks import wait_for_any
from cluster.routing.waiting_room import Waiting, WaitingRoom

if TYPE_CHECKING:
    from cluster.routing.attempt import Attempt

logger = logging.getLogger(__name__)

# Somebody tells of room and of mail; this is for replicas that nobody is going to wait for any more.
_LOOK_AGAIN_S = 1.0

WaitsUntil = Callable[[float], float]  # monotonic, of one that has waited since then, as things are now


class MovedOn(Exception):
    """It goes on as another attempt, which is open already and has to be run or closed."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self.attempt = attempt


class AdmissionWait:
    """Use once. On the router's event loop.

    began_s: when it began to wait, before it was moved too. Meanwhile it sits in the router's room.
    """

    def __init__(
        self,
        room: WaitingRoom[AdmissionWait],
        waiting_at: Waiting[Any],
        decide: Callable[[], Route | NeverFits | Unavailable],
        waits_until: WaitsUntil,
        began_s: float,
    ) -> None:
        """waiting_at: where it sits, without itself. decide: where it would go as things are now."""
        self.began_s = began_s
        self._room, self._decide, self._waits_until = room, decide, waits_until
        self.seat: Waiting[AdmissionWait] = waiting_at
        self.seat.who = self
        self._called: asyncio.Future[Attempt] = asyncio.get_running_loop().create_future()

    def decide(self) -> Route | NeverFits | Unavailable | None:
        """Where it would go now; None: it is called away already."""
        return None if self._called.done() else self._decide()

    def call(self, attempt: Attempt) -> None:
        """It is to go on as this one, which is open: `wait` raises MovedOn. Once."""
        self._called.set_result(attempt)

    async def wait(self, arrival: asyncio.Future[Any], over: asyncio.Future[Any]) -> None:
        """Until one of them is done or its patience ends; the caller sees which. Raises MovedOn."""
        self._room.enter(self.seat)
        is_taken, is_told = False, False
        try:
            while not (arrival.done() or over.done()):
                now_s = time.monotonic()
                left_s = self._waits_until(self.began_s) - now_s
                if left_s <= 0.0:
                    return
                await wait_for_any(arrival, over, self._called, timeout_s=min(left_s, _LOOK_AGAIN_S))
                if self._called.done():
                    is_taken = True
                    raise MovedOn(self._called.result())
        finally:
            self._room.leave(self.seat)
            if self._called.done() and not is_taken:
                self._called.result().close()
