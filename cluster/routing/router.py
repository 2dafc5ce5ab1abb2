"""Runs a generation: picks replicas, runs attempts, retries what failed, yields tokens in order, each once.

Nothing of it is visible to the client but the tokens and, at the end, one error if there is no other way.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Collection
from functools import partial

from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.monitoring.throughput import WorkState
from cluster.policies.routing_policy import Route, RouteKind, RoutingRules
from cluster.routing.admission_wait import AdmissionWait, AdmissionWaits, MovedOn
from cluster.routing.attempt import Attempt
from cluster.routing.attempt_failed import AttemptFailed, AttemptHistory
from cluster.routing.attempt_parts import AttemptParts
from cluster.routing.avoided_pairs import AvoidedPairs
from cluster.routing.batch_queue import BatchQueue
from cluster.routing.cold_start import ColdStart
from cluster.routing.dead_replicas import DeadReplicas
from cluster.routing.decode_side import AttemptMoved
from cluster.routing.demand_meter import DemandMeter
from cluster.routing.detached_tasks import start_detached
from cluster.routing.failed_attempts import FailedAttempts
from cluster.routing.frame_intake import FrameIntake
from cluster.routing.generation import ChoiceState, Generation, GenerationItem, Leg
from cluster.routing.mailboxes import Mailboxes
from cluster.routing.moves import Moves
from cluster.routing.order_book import OrderBook
from cluster.routing.pool_client import Loss, PoolClient
from cluster.routing.pool_finder import PoolFinder
from cluster.routing.pool_view import PoolView
from cluster.routing.prompt_forecast import PrefixForecasts
from cluster.routing.pulse_table import PulseRules
from cluster.routing.replica_registry import ReplicaTable
from cluster.routing.route_finder import RouteFinder
from cluster.routing.route_wait import RouteWait
from cluster.routing.router_limits import RouterLimits
from cluster.routing.slow_transfers import SlowTransferWatch, slowest_reads
from cluster.routing.unlike_replicas import SameTokenizer, UnlikeReplica, UnlikeWatch
from cluster.routing.watched_pool import WatchedPool
from replicas.messages import Frame

logger = logging.getLogger(__name__)


class Router:
    """One per ingress replica, on its event loop."""

    def __init__(
        self,
        *,
        decode: PoolClient,
        prefill: PoolClient | None,
        rules: RoutingRules,
        limits: RouterLimits,
        metrics: IngressMetrics,
        channel_host: str,
        tokenizer: str = "",
        has_prefix_cache: bool = False,
    ) -> None:
        """tokenizer: digest of the ingress's own; replicas with another are not used. Empty: any is right.
        has_prefix_cache: whether replicas have one; else nothing is hashed, kept or asked for."""
        self._rules, self._limits, self._metrics = rules, limits, metrics
        self._forecasts = PrefixForecasts(has_prefix_cache, limits.block_size, metrics.prefix_found)
        self._decode = self._watched("decode", decode)
        self._prefill = self._watched("prefill", prefill) if prefill else None
        self.pools = [pool for pool in (self._decode, self._prefill) if pool is not None]
        self._decode_table: ReplicaTable = {}
        self._same = SameTokenizer(tokenizer)
        self._unlike = UnlikeWatch(self._same, metrics.unlike)
        self._slow = SlowTransferWatch(metrics.slow_transfers.set)
        self._view = PoolView(lambda: self.usable("decode"), lambda: self.usable("prefill"))
        self._finder = PoolFinder(self._decode, self._prefill, self._view, metrics)
        self._avoided = AvoidedPairs()
        self.orders = OrderBook(metrics, limits.cold_start_timeout_s)
        self._routes = RouteFinder(self._view, rules, self._forecasts, metrics, self.orders.next_in_s)
        self._moves = Moves(self._view, rules, limits.migration, limits.block_size, metrics)
        dead = DeadReplicas(self.pools, self._view, limits.attempt.tail_s)
        for pool in self.pools:
            pool.tell_of_deaths(dead.found)
        self._waits = AdmissionWaits(self.orders, limits, metrics, self._view)
        given_up, pairs = self._waits.given_up, self._view.pairs
        self._failures = FailedAttempts(rules, limits, metrics, self._routes, pairs, dead, given_up)
        self._cold_start = ColdStart(rules, limits, metrics, self.orders, self._is_silent)
        self._ways = RouteWait(self._routes, self._cold_start, self._waits.recovers_until_s)
        self.demand = DemandMeter(self._view, self._cold_start, prefill is not None)
        self._mailboxes = Mailboxes()
        self._intake = FrameIntake(
            f"router-{uuid.uuid4().hex[:12]}",
            channel_host,
            self._finder.of,
            self._mailboxes,
            on_frame=self._on_frame,
            on_gap=lambda: metrics.retried("frames"),
            replay_timeout_s=limits.attempt.tail_s,
        )

    async def start(self) -> None:
        """Bind the token channel. Before any generation."""
        await self._intake.receiver.start()
        for pool in self.pools:
            pool.start()

    async def stop(self) -> None:
        """Close the token channel. After the last generation."""
        await self._moves.stop()
        for pool in self.pools:
            await pool.stop()
        await self._intake.receiver.stop()

    def let_be_empty(self, names: Collection[str]) -> None:
        """Of these pools a request waits for the first replica, if they have none. On the router's event loop."""
        self._cold_start.watch({pool.name: pool.staying for pool in self.pools if pool.name in names})

    def pools_changed(self, decodes: ReplicaTable) -> None:
        """The decode pool is this now. On the router's event loop."""
        self._decode_table = decodes
        self.prefill_changed()

    def prefill_changed(self) -> None:
        """The prefill pool is another now. On the router's event loop."""
        self._intake.admit({**self._finder.away(), **self._decode_table})
        self._unlike.look({pool.name: pool.replicas() for pool in self.pools})
        # Of those that left something may still be open here: then they are forgotten at the next change.
        present = {name for pool in self.pools for name in pool.replicas()}
        self._view.left(present)
        self._moves.left(present)
        self._forecasts.present(pool.replicas() for pool in self.pools)
        for pool in self.pools:
            self.orders.present(pool.name, pool.staying())
        self._cold_start.wake()
        self._waits.move()

    def usable(self, pool_name: str) -> ReplicaTable:
        """Of this pool those that requests may be sent to; none of a pool that is not deployed."""
        return next((self._same.of(pool.usable()) for pool in self.pools if pool.name == pool_name), {})

    @property
    def unlike(self) -> tuple[UnlikeReplica, ...]:
        """Those that can't work with this ingress or with the other pool."""
        return self._unlike.found

    @property
    def slow_transfers(self) -> SlowTransferWatch:
        """What is known of how fast KV is read."""
        return self._slow

    @property
    def is_healthy(self) -> bool:
        """Whether tokens are still being received."""
        return self._intake.receiver.is_alive

    @property
    def num_waiting(self) -> int:
        return self._view.num_waiting

    @property
    def work_state(self) -> WorkState:
        """What waits here, and how full decode is."""
        return WorkState(self.num_waiting + self._cold_start.num_held, self._view.promised)

    async def generate(self, generation: Generation) -> AsyncGenerator[list[GenerationItem], None]:
        """Tokens of all choices as they come, all that are there at a time, in order within each choice; before them,
        if asked for, what the model thought of the prompt. Raises ApiError.

        Closing the iterator (or cancelling its consumer) ends all work for it, at once, everywhere.
        """
        self._failures.quarantine.check(generation.spec)
        deadline_s = time.monotonic() + generation.timeout_s
        output: BatchQueue[GenerationItem] = BatchQueue()
        choices = {choice: ChoiceState() for choice in range(generation.spec.num_answers)}
        leg = Leg(generation, choices, output, came_s=time.monotonic())
        need = self._routes.need(leg)
        with self.demand.opened(need, self._rules) as demand:
            await self._ways.for_first(leg, deadline_s, self._most_held)
            self._waits.move()  # who waits goes before who comes
            # Decided and counted before anything more waits: of requests that come together each sees those before it.
            route = await self._ways.route(leg, AttemptHistory(), deadline_s, self._most_held)
            self._waits.check_room(route, self.num_waiting, len(self._decode.replicas()) + len(self._finder.away()))
            first = self._open_attempt(leg, AttemptHistory(), deadline_s, route)
            run = start_detached(self._run_leg(leg, deadline_s, AttemptHistory(), first))
            run.add_done_callback(lambda _: first.close())  # it may be cancelled before it begins
            run.add_done_callback(lambda _: output.close())
            try:
                while items := await output.take():
                    demand.prompt_done()
                    yield items
                await run  # its error, if it has one
            finally:
                run.cancel()
                await asyncio.wait({run})

    # -- one leg, over its attempts ----------------------------------------------------------------

    async def _run_leg(self, leg: Leg, deadline_s: float, past: AttemptHistory, attempt: Attempt | None = None) -> None:
        while True:
            if attempt is None:
                await self._ways.for_first(leg, deadline_s)
                attempt = self._open_attempt(leg, past, deadline_s, await self._ways.route(leg, past, deadline_s))
            try:
                with self._moves.known(attempt, deadline_s):
                    await attempt.run_until(deadline_s)
                return
            except MovedOn as moved:
                attempt = moved.attempt
                continue
            except AttemptMoved as passed_on:
                attempt = self._moves.successor(passed_on)
                continue
            except AttemptFailed as failure:
                self._moves.failed(attempt)
                past = self._failures.after(leg, attempt, failure, past, deadline_s)
            attempt = None
            await asyncio.sleep(past.pause_s(self._limits.retry_delay_s))
            legs = leg.split()
            if len(legs) > 1:
                await self._run_apart(legs, deadline_s, past)
                return
            (leg,) = legs

    async def _run_apart(self, legs: list[Leg], deadline_s: float, past: AttemptHistory) -> None:
        """Choices that have parted go on each by itself; the first error ends them all."""
        try:
            async with asyncio.TaskGroup() as group:
                for leg in legs:
                    group.create_task(self._run_leg(leg, deadline_s, past))
        except ExceptionGroup as errors:
            # Not `except*`: what that raises is a group again.
            raise errors.exceptions[0] from None

    def _open_attempt(
        self, leg: Leg, past: AttemptHistory, deadline_s: float, route: Route, before: AdmissionWait | None = None
    ) -> Attempt:
        """before: the wait in which it was called to this route."""
        decide, go_on = partial(self._routes.elsewhere, leg, past), partial(self._open_attempt, leg, past, deadline_s)
        attempt = Attempt(
            leg,
            route,
            self._routes.forecast(leg).sent(route),
            self._parts(),
            request_id=uuid.uuid4().hex,
            deadline_s=deadline_s,
            wait=self._waits.begin(leg, route, decide, go_on, before),
        )
        attempt.open()
        leg.generation.binding.lean(route.model)
        self._metrics.routed(route.kind)
        self._finder.note(route)
        self._avoided.note(route, self._view.pairs)
        if route.kind is RouteKind.FALLBACK:
            extra = {"event": "fallback", "generation": leg.generation.generation_id, "decode": route.decode_id}
            logger.warning("no prefill replica of its model: decode computes the prompt", extra=extra)
        return attempt

    def _parts(self) -> AttemptParts:
        limits, channel = self._limits.attempt, self._intake.address
        return AttemptParts(self._finder.of, self._view, self._mailboxes, channel, limits)

    # -- decisions ---------------------------------------------------------------------------------

    @property
    def _most_held(self) -> int:
        """New requests that may wait for the first replica of a pool."""
        return self._limits.max_queued_requests - self.num_waiting

    def _watched(self, name: str, pool: PoolClient) -> WatchedPool:
        rules = PulseRules.of(self._limits.frozen_after_s)
        return WatchedPool(
            name, pool, rules, self._on_lost, lambda *load: self._view.heard_load(*load), self._forecasts.feed(name),
            lambda replica_id: self._moves.leaving(replica_id), lambda: self._cold_start.wake(),
        )  # fmt: skip

    def _is_silent(self, pool_name: str) -> bool:
        return any(self._same.of(pool.silent()) for pool in self.pools if pool.name == pool_name)

    # -- what becomes of the replicas, and what they say -------------------------------------------

    def _on_lost(self, pool_name: str, loss: Loss) -> None:
        self._metrics.replica_lost(pool_name, loss)
        if loss is Loss.DEAD:  # it is replaced, though Serve has told nobody yet
            (pool,) = (pool for pool in self.pools if pool.name == pool_name)
            self.orders.present(pool_name, pool.staying())

    def _on_frame(self, frame: Frame) -> None:
        self._view.heard(frame)
        if self._slow.is_due(time.monotonic()):
            self._slow.look(slowest_reads(self.usable("decode"), self._view.loads(), self._view.prefill_loads()))
        self._finder.heard(frame.replica_id, frame.load)
        if frame.load.missing_blocks:
            self._moves.relieve(frame.replica_id)
        self._mailboxes.deliver(frame)
        self._waits.move_if_due()
