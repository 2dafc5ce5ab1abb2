"""Waits for a decode replica to admit a request, and for prefill to compute its prompt: how long, and to where one is
called meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from cluster.api_error import ApiError
from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import NeverFits, Route, Unavailable
from cluster.routing.detached_tasks import wait_for_any
from cluster.routing.generation import Leg
from cluster.routing.order_book import OrderBook
from cluster.routing.pool_view import PoolView
from cluster.routing.prompt_room import PromptRoom, WaitingPrompt
from cluster.routing.replica_orders import waits_until
from cluster.routing.router_limits import RouterLimits
from cluster.routing.waiting_room import Waiting, WaitingRoom

logger = logging.getLogger(__name__)

# Somebody tells of room and of mail; this is for replicas that nobody is going to wait for any more.
_LOOK_AGAIN_S = 1.0
_TELL_EVERY_S = 10.0


class _Closable(Protocol):
    def close(self) -> None: ...


class MovedOn(Exception):
    """It goes on as another attempt (`cluster.routing.attempt`), which is open already: to be run, or closed."""

    def __init__(self, attempt: Any) -> None:
        super().__init__(attempt)
        self.attempt = attempt


class Patience:
    """How long requests wait, with what is known of replicas on their way. One per router, on its event loop."""

    def __init__(self, orders: OrderBook, limits: RouterLimits) -> None:
        self._orders, self._limits = orders, limits
        self._told_s: dict[str, float] = {}

    async def for_decode(self, began_s: float, has_begun: Callable[[], bool], *futures: asyncio.Future[Any]) -> None:
        """Until one of them is done, or nobody waits longer for decode to admit him who has waited since began_s: but
        for a moment in which he is admitted where there is room. has_begun: whether he has something of his answer by
        now, which may have come elsewhere: then only his own deadline counts."""
        timeout_s = self._limits.attempt.queue_timeout_s
        least_s = time.monotonic() + self._limits.attempt.moment_s
        while not any(future.done() for future in futures):
            await self._wait("decode", began_s, began_s, timeout_s, futures, least_s)
            if not has_begun():
                return
            await wait_for_any(*futures, timeout_s=_LOOK_AGAIN_S)

    async def for_prefill(self, asked_s: float, began_s: float, *futures: asyncio.Future[Any]) -> None:
        """Likewise, for prefill to answer, who has waited for that since asked_s, and at this replica since began_s."""
        await self._wait("prefill", asked_s, began_s, self._limits.attempt.handoff_timeout_s, futures)

    async def _wait(
        self,
        pool: str,
        asked_s: float,
        began_s: float,
        timeout_s: float,
        futures: tuple[asyncio.Future[Any], ...],
        least_s: float = 0.0,
    ) -> None:
        """least_s: not before that."""
        while not any(future.done() for future in futures):
            now_s, coming = time.monotonic(), self._orders.coming(pool)
            longest_s = self._limits.cold_start_timeout_s
            bounds_s = [waits_until(since_s, timeout_s, longest_s, coming) for since_s in {asked_s, began_s}]
            until_s = max(least_s, *bounds_s)
            if now_s >= until_s:
                return
            if now_s >= began_s + timeout_s:
                self._tell(pool, now_s)
            await wait_for_any(*futures, timeout_s=min(until_s - now_s, _LOOK_AGAIN_S))

    def _tell(self, pool: str, now_s: float) -> None:
        """That somebody waits longer than he would otherwise: not of each of them."""
        if now_s - self._told_s.get(pool, float("-inf")) >= _TELL_EVERY_S:
            self._told_s[pool] = now_s
            extra = {"event": "waits_for_replicas", "pool": pool, "num_ordered": self._orders.coming(pool).num}
            logger.info("requests wait on for %s replicas that were ordered", pool, extra=extra)


class AdmissionWait:
    """Of one attempt; use once. began_s: as if its request had waited for decode since then, all its waits together;
    asked_s: when it began to wait for its prompt, before it was moved too; 0.0 before that."""

    def __init__(
        self,
        seat: Waiting[AdmissionWait],
        began_s: float,
        room: WaitingRoom[AdmissionWait],
        prompts: PromptRoom[AdmissionWait],
        patience: Patience,
        leg: Leg,
        decide: Callable[[], Route | NeverFits | Unavailable],
        go_on: Callable[[Route, AdmissionWait], _Closable],
    ) -> None:
        self.seat, self.began_s, self.asked_s = seat, began_s, 0.0
        self._room, self._prompts, self._patience, self._leg = room, prompts, patience, leg
        self._decide, self._go_on = decide, go_on
        self._called: asyncio.Future[_Closable] | None = None

    def decide(self) -> Route | NeverFits | Unavailable | None:
        """Where it would go as things are now; None: it has been called already."""
        return None if self._called is None or self._called.done() else self._decide()

    def call(self, route: Route) -> None:
        """It is to go there, and is counted there from now on: who waits gets MovedOn. Once, after `decide`."""
        assert self._called is not None
        self._called.set_result(self._go_on(route, self))

    async def wait(self, arrival: asyncio.Future[Any], over: asyncio.Future[Any]) -> None:
        """Until one of them is done or its patience ends; the caller sees which. Raises MovedOn."""
        leg, since_s = self._leg, time.monotonic()
        with self._may_be_called() as called:
            self._room.enter(self.seat)
            try:
                await self._patience.for_decode(self.began_s, lambda: leg.has_begun, arrival, over, called)
            finally:
                self._room.leave(self.seat)
                leg.waited_s += time.monotonic() - since_s

    def is_admitted_anew(self, now_s: float) -> None:
        """It had been admitted, and goes elsewhere: what it has waited for that before counts. Mutates."""
        self.began_s = now_s - self._leg.waited_s

    async def for_prompt(
        self, answer: asyncio.Future[Any], over: asyncio.Future[Any], prefill_id: str, num_tokens: int, began_s: float
    ) -> None:
        """Until one of them is done or the patience for a prompt ends that was sent to prefill at began_s. num_tokens:
        that are computed there. Raises MovedOn."""
        prompt: WaitingPrompt[AdmissionWait] = WaitingPrompt(
            prefill_id, num_tokens, time.monotonic(), self.seat.num_moves
        )
        prompt.who = self
        self.asked_s = self.asked_s or began_s
        with self._may_be_called() as called:
            self._prompts.enter(prompt)
            try:
                await self._patience.for_prefill(self.asked_s, began_s, answer, over, called)
            finally:
                self._prompts.leave(prompt)

    @contextmanager
    def _may_be_called(self) -> Iterator[asyncio.Future[_Closable]]:
        """Raises MovedOn at its end, if it was. No attempt remains open that nobody takes: its client may have gone."""
        called = self._called = asyncio.get_running_loop().create_future()
        try:
            yield called
        except BaseException:
            if called.done():
                called.result().close()
            raise
        finally:
            self._called = None
        if called.done():
            raise MovedOn(called.result())


class AdmissionWaits:
    """All of one router, on its event loop: as long as anybody may wait with what is known of replicas on their way,
    and in its place among the others."""

    def __init__(self, orders: OrderBook, limits: RouterLimits, metrics: IngressMetrics, view: PoolView) -> None:
        self._orders, self._limits, self._metrics, self._view = orders, limits, metrics, view
        self._patience = Patience(orders, limits)
        self.room: WaitingRoom[AdmissionWait] = WaitingRoom(limits.settle_s)
        self.prompts: PromptRoom[AdmissionWait] = PromptRoom(limits.settle_s)

    def begin(
        self,
        leg: Leg,
        route: Route,
        decide: Callable[[], Route | NeverFits | Unavailable],
        go_on: Callable[[Route, AdmissionWait], _Closable],
        before: AdmissionWait | None = None,
    ) -> AdmissionWait:
        """The wait of an attempt at a leg. go_on: opens the attempt with which it goes on elsewhere. before: the wait
        from which it was called."""
        now_s = time.monotonic()
        num_moves = 0 if before is None else before.seat.num_moves + 1
        spec, place = leg.generation.spec, (route.decode_id, now_s, leg.came_s, leg.has_begun, num_moves)
        seat: Waiting[AdmissionWait] = Waiting(*place, priority=spec.priority, client=spec.client)
        began_s = now_s - leg.waited_s if before is None else before.began_s
        wait = AdmissionWait(seat, began_s, self.room, self.prompts, self._patience, leg, decide, go_on)
        seat.who = wait
        wait.asked_s = 0.0 if before is None else before.asked_s
        return wait

    def move(self) -> None:
        """Whoever waits goes to where there is room now, as far as there is."""
        now_s = time.monotonic()
        for wait, route in self.room.movable(now_s, AdmissionWait.decide):
            self._call(wait, route, "decode")
        if self.prompts.is_due(now_s):
            queued = {found.replica_id: found.queued_tokens for found in self._view.prefill_candidates()}
            for wait, route in self.prompts.movable(now_s, queued, AdmissionWait.decide):
                wait.is_admitted_anew(now_s)
                self._call(wait, route, "prefill")

    def _call(self, wait: AdmissionWait, route: Route, at: str) -> None:
        extra = {"event": "moved", "waited_at": at, "decode": route.decode_id, "prefill": route.prefill_id}
        logger.info("a waiting request goes to a replica that has room", extra=extra)
        self._metrics.queue_moves.add()
        wait.call(route)

    def move_if_due(self) -> None:
        """`move`, but not more often than is of use."""
        now_s = time.monotonic()
        if self.room.is_due(now_s) or self.prompts.is_due(now_s):
            self.move()

    def check_room(self, route: Route, num_waiting: int, num_replicas: int) -> None:
        """Raises ApiError, and counts it, for one that would have to wait when as many wait as may."""
        if route.must_wait and num_waiting >= self._limits.max_queued_requests:
            self._metrics.rejected("queue_full")
            extra = {"event": "queue_full", "num_waiting": num_waiting}
            logger.warning("the queue is full: a request was turned away", extra=extra)
            raise _queue_full(num_waiting, num_replicas, self.next_arrival_s)

    def recovers_until_s(self, pool: str, began_s: float) -> float:
        """When one gives up whose answer has begun and who has waited since began_s for a pool that has nobody for him:
        after the config's time, or as long as the start of those on their way may take, if that is longer; without any
        in the config at once."""
        patience_s, coming = self._limits.recovery_timeout_s, self._orders.coming(pool)
        until_s = began_s + patience_s
        if patience_s and coming.num:
            return max(until_s, min(coming.due_s, began_s + self._limits.cold_start_timeout_s))
        return until_s

    @property
    def next_arrival_s(self) -> float | None:
        """From now on, until a decode replica that was ordered is expected; None: there is none on its way."""
        coming = self._orders.coming("decode")
        return coming.next_s - time.monotonic() if coming.num else None

    def given_up(self, error: ApiError) -> ApiError:
        """What a client is told whose request has ended so. One who has waited as long as anybody may is counted; where
        replicas were ordered that have not come, not only others were in his way, but something is down."""
        if error.code != "queue_timeout":
            return error
        coming = self._orders.coming("decode")
        num_late = coming.num + coming.num_overdue
        if not num_late:
            self._metrics.rejected("queue_timeout")
            return error
        self._metrics.rejected("no_capacity")
        logger.warning(
            "a request has waited in vain for replicas that were ordered",
            extra={"event": "replicas_overdue", "num": num_late},
        )
        return ApiError(
            503,
            f"no decode replica had room in time, and of those that were ordered {num_late} have not started; try "
            "again later",
            code="unavailable",
            retry_after_s=max(1.0, self.next_arrival_s or self._orders.start_s("decode")),
        )


def _queue_full(num_waiting: int, num_replicas: int, next_arrival_s: float | None) -> ApiError:
    """What a client is told when too many wait. When to try again is a guess: as if each replica ended one a second, or
    when the next replica is expected (next_arrival_s from now on), if that is later."""
    return ApiError(
        429,
        f"{num_waiting} requests are waiting for memory or a slot, the most allowed; try again later",
        code="queue_full",
        retry_after_s=max(1.0, float(num_waiting // max(1, num_replicas)), next_arrival_s or 0.0),
    )
