"""A router on the simulated clock: the shipped routing policy over a pool view, as the router itself does it."""

from __future__ import annotations

import time
from collections import ChainMap

from cluster.policies.routing_policy import Need, NeverFits, Route, RouteKind, RoutingRules, Unavailable
from cluster.routing.demand_meter import DemandMeter, OpenDemand
from cluster.routing.pairing import choose_route
from cluster.routing.pool_view import PoolView
from cluster.routing.prompt_forecast import PrefixForecasts, PromptForecast, SentPrompt
from cluster.simulation.client import Attempt, Client, ClientStatus, spec_of
from cluster.simulation.cost_model import CostModel
from cluster.simulation.event_queue import Action, EventQueue, Order
from cluster.simulation.pool_pulses import PoolPulses
from cluster.simulation.router_counts import RouterCounts
from cluster.simulation.router_times import RouterTimes
from cluster.simulation.simulated_frame import SimulatedFrame
from cluster.simulation.simulated_pool import SimulatedPool
from cluster.simulation.simulated_waits import SimulatedWaits
from replicas.messages import CallStatus, EngineLoad, Frame, PrefillReply

# As cluster.routing.router waits before it replays what was evicted: half its retry delay.
_REPLAY_DELAY_S = 0.025


class SimulatedRouter:
    """One ingress. It does not retry what timed out: that request is lost, and counted."""

    def __init__(
        self,
        index: int,
        block_size: int,
        rules: RoutingRules,
        times: RouterTimes,
        costs: CostModel,
        queue: EventQueue,
        decode: SimulatedPool,
        prefill: SimulatedPool | None,
        has_prefix_cache: bool,
    ) -> None:
        """prefill None: colocated."""
        self.counts = RouterCounts()
        self._index, self._block_size, self._rules, self._times = index, block_size, rules, times
        self._costs, self._queue = costs, queue
        self._engines = ChainMap(decode.engines, prefill.engines if prefill else {})
        self._tables = {pool.name: pool.table for pool in (decode, prefill) if pool is not None}
        self.view = PoolView(lambda: decode.table, lambda: prefill.table if prefill else {}, lambda: queue.now_s)
        self.forecasts = PrefixForecasts(has_prefix_cache, block_size, self.counts.found, lambda: queue.now_s)
        self.pulses = PoolPulses(self.view, self.forecasts, self._tables)
        self.waits = SimulatedWaits(times, lambda: queue.now_s)
        self.demand = DemandMeter(self.view, self.waits.held, rules.has_prefill_pool)
        self._open: dict[int, OpenDemand] = {}  # by job

    # -- from the client ---------------------------------------------------------------------------

    def arrive(self, client: Client, now_s: float) -> None:
        """A request has been read; the decision is taken now."""
        self._open[client.job.index] = self.demand.opened(self._need(client)[0], self._rules)
        self._move(now_s)
        self._try(client, now_s)
        if not client.is_over:
            over_s = max(now_s, client.job.arrival_s + self._times.request_timeout_s)
            self._at(over_s, client, lambda at_s: self._time_out_client(client, at_s))

    def _try(self, client: Client, now_s: float) -> None:
        need, forecast = self._need(client)
        route = self._decide(need)
        if isinstance(route, Unavailable):
            self.waits.held.hold(client, need)
            return
        if isinstance(route, NeverFits):
            self._over(client, ClientStatus.NEVER_FITS)
        elif route.must_wait and client.num_attempts == 0 and self.view.num_waiting >= self._times.max_queued_requests:
            self._over(client, ClientStatus.QUEUE_FULL)
        else:
            self._send(client, route, forecast, now_s)

    def _send(self, client: Client, route: Route, forecast: PromptForecast, now_s: float) -> None:
        job, num_tokens = client.job, client.num_tokens
        prompt_len, output_len = job.prompt_len + num_tokens, job.output_len - num_tokens
        max_tokens = job.max_tokens - num_tokens
        request_id = f"{job.index}.{client.num_attempts}"
        attempt = Attempt(client, route, request_id, prompt_len, output_len, max_tokens)
        attempt.last_token_s = client.last_s
        attempt.prompt = forecast.sent(route)
        client.attempt = attempt
        client.num_attempts += 1
        self.counts.num_waited += route.must_wait
        self.view.sent(route.decode_id, route.decode_blocks, route.must_wait, attempt.local_tokens)
        self.view.pairs.sent(route, attempt.read_tokens)
        if route.prefill_id is not None:
            self.view.prompt_coming(route.prefill_id, attempt.computed_tokens)
            # A pair is measured as soon as it meets.
            self.view.pairs.measured(route.decode_id, [(route.prefill_id, self._costs.transfer.bytes_per_s)])
        deadline_s = job.arrival_s + self._times.request_timeout_s
        decode = self._engines[route.decode_id]
        self._call(attempt, now_s, lambda at_s: decode.generate(attempt, deadline_s, at_s))
        attempt.prompt.tell()
        self.waits.enter(attempt, now_s)
        self._at(now_s + self._times.queue_timeout_s, client, lambda at_s: self._time_out_queue(client, at_s))

    def _need(self, client: Client) -> tuple[Need, PromptForecast]:
        """What is left of it, as of now."""
        job, forecast = client.job, PromptForecast()
        prompt_len, max_tokens = job.prompt_len + client.num_tokens, job.max_tokens - client.num_tokens
        if self.forecasts.index is not None:
            forecast = self.forecasts.of(spec_of(job, prompt_len, max_tokens))
        facts = prompt_len, max_tokens, 1, self._block_size
        return Need(*facts, cached=forecast.cached(), has_begun=client.num_tokens > 0), forecast

    def pools_changed(self) -> None:
        """A replica has come, or one takes no more work."""
        self.forecasts.present(self._tables.values())
        for pool, table in self._tables.items():
            self.waits.orders.present(pool, table)

    def wake(self, now_s: float) -> None:
        """A replica has come: whom a pool without any kept waiting is routed, and who waits elsewhere may go there."""
        for client in self.waits.held.release():
            self._try(client, now_s)
        self._move(now_s)

    def _move(self, now_s: float) -> None:
        queued = {found.replica_id: found.queued_tokens for found in self.view.prefill_candidates()}
        for attempt, route in self.waits.movable(now_s, queued, lambda of: self._decide(self._need(of.client)[0])):
            self._send(attempt.client, route, self._need(attempt.client)[1], now_s)
            self._cancel(attempt, now_s)

    def _over(self, client: Client, status: ClientStatus) -> None:
        client.status = status
        self._open.pop(client.job.index).close()

    def _decide(self, need: Need) -> Route | NeverFits | Unavailable:
        started = time.thread_time()
        candidates = self.view.decode_candidates(), self.view.prefill_candidates()
        route = choose_route(need, *candidates, self._rules, pairs=self.view.pairs.of)
        self.counts.decided(time.thread_time() - started)
        return route

    # -- from the replicas -------------------------------------------------------------------------

    def heard(self, replica_id: str, load: EngineLoad) -> None:
        """A decode replica's load."""
        self.view.heard(Frame(replica_id, "", 0, load, (), (), (), (), ()))

    def on_frame(self, frame: SimulatedFrame, now_s: float) -> None:
        """What one decode iteration said of this router's requests. Its load has been heard."""
        for attempt in frame.admitted:
            self._admitted(attempt, now_s)
        for attempt in frame.evicted:
            self._evicted(attempt, now_s)
        for attempt in frame.finished:
            self._finish(attempt, attempt.last_token_s + self._costs.control.frame_s)
        if frame.finished:  # so there is room; real routers look at each frame
            self._move(now_s)

    def prompt_done(self, attempt: Attempt, load: EngineLoad, is_over: bool, now_s: float) -> None:
        """Prefill's answer is here, with the first token. is_over: that is all there will be."""
        assert attempt.route.prefill_id is not None
        if attempt.is_prefilling:
            attempt.answered_s = now_s
            self._open[attempt.client.job.index].prompt_done()
            self._prompt_over(attempt)
            self.view.heard_load(attempt.route.prefill_id, load)
            reply = PrefillReply(CallStatus.OK, "", (), 0.0, 0.0, load, num_cached=attempt.prefill_found)
            attempt.prompt.prefilled(reply)
        if is_over and not attempt.is_closed:
            decode = self._engines[attempt.route.decode_id]
            self._call(attempt, now_s, lambda at_s: decode.cancel(attempt.request_id, at_s))
            self._finish(attempt, now_s)

    def _prompt_over(self, attempt: Attempt) -> None:
        assert attempt.route.prefill_id is not None
        attempt.is_prefilling = False
        self.waits.prompt_over(attempt)
        self.view.prompt_answered(attempt.route.prefill_id, attempt.computed_tokens)

    def handed_over(self, attempt: Attempt) -> None:
        """Decode has read its KV, or does not want it."""
        if attempt.is_coming:
            attempt.is_coming = False
            self.view.pairs.arrived(attempt.route, attempt.read_tokens)
            self.view.pairs.worked(attempt.route)

    def _admitted(self, attempt: Attempt, now_s: float) -> None:
        if attempt.is_closed:
            return
        self._hear_admission(attempt)
        if attempt.route.kind is RouteKind.REMOTE:
            prefill_id = attempt.route.prefill_id
            assert prefill_id is not None
            self.view.prompt_sent(prefill_id, attempt.computed_tokens)
            attempt.is_prefilling = True
            self.waits.prompt_sent(attempt, now_s)
            prefill, times = self._engines[prefill_id], self._times
            over_s, lost_s = attempt.client.job.arrival_s + times.request_timeout_s, now_s + times.handoff_timeout_s
            self._call(attempt, now_s, lambda at_s: prefill.prefill(attempt, over_s, at_s))
            self._at(lost_s, attempt.client, lambda at_s: self._time_out_handoff(attempt, now_s, at_s))

    def _evicted(self, attempt: Attempt, now_s: float) -> None:
        """Its memory was needed by others: once more, with what there is as prompt."""
        if attempt.is_closed:
            return
        client = attempt.client
        client.num_tokens += attempt.num_tokens
        client.last_s = attempt.last_token_s
        self.counts.num_replays += 1
        self._close(attempt)

        def replay(at_s: float) -> None:
            if not client.is_over:
                self._try(client, at_s)

        self._at(now_s + _REPLAY_DELAY_S, client, replay)

    def _finish(self, attempt: Attempt, heard_s: float) -> None:
        """heard_s: when the last token reached this router."""
        if attempt.is_closed:
            return
        client = attempt.client
        client.num_tokens += attempt.num_tokens
        client.last_s = heard_s + self._costs.control.stream_s
        self._over(client, ClientStatus.FINISHED)
        self._close(attempt)

    # -- patience ----------------------------------------------------------------------------------

    def _time_out_queue(self, client: Client, now_s: float) -> None:
        attempt = client.attempt
        if attempt is None or attempt.is_admitted or attempt.is_closed:
            return
        if (again_s := self.waits.admission_over_s(attempt, now_s)) is None:
            self._give_up(attempt, ClientStatus.QUEUE_TIMEOUT, now_s)
        else:
            self._at(again_s, client, lambda at_s: self._time_out_queue(client, at_s))

    def _time_out_handoff(self, attempt: Attempt, began_s: float, now_s: float) -> None:
        if attempt.has_moved or attempt.is_closed:
            return
        if (again_s := self.waits.prompt_over_s(attempt, began_s, now_s)) is None:
            self._give_up(attempt, ClientStatus.TIMEOUT, now_s)
        else:
            self._at(again_s, attempt.client, lambda at_s: self._time_out_handoff(attempt, began_s, at_s))

    def _time_out_client(self, client: Client, now_s: float) -> None:
        attempt = client.attempt
        if not client.is_over and (attempt is None or attempt.is_closed):
            self._over(client, ClientStatus.TIMEOUT)
        elif not client.is_over and attempt is not None:
            self._give_up(attempt, ClientStatus.TIMEOUT, now_s)

    def _give_up(self, attempt: Attempt, status: ClientStatus, now_s: float) -> None:
        self._over(attempt.client, status)
        attempt.client.num_tokens += attempt.num_tokens
        self._cancel(attempt, now_s)

    def _cancel(self, attempt: Attempt, now_s: float) -> None:
        decode = self._engines[attempt.route.decode_id]
        self._call(attempt, now_s, lambda at_s: decode.cancel(attempt.request_id, at_s))
        if attempt.is_prefilling and attempt.route.prefill_id is not None:
            prefill = self._engines[attempt.route.prefill_id]
            self._call(attempt, now_s, lambda at_s: prefill.cancel(attempt.request_id, at_s))
        self._close(attempt)

    def _close(self, attempt: Attempt) -> None:
        attempt.is_closed = True
        if attempt.client.attempt is attempt:  # else it goes on as another
            self.waits.leave(attempt)
        if attempt.is_prefilling:
            self._prompt_over(attempt)
        self._hear_admission(attempt)
        if attempt.is_coming:
            attempt.is_coming = False
            self.view.pairs.arrived(attempt.route, attempt.read_tokens)
        is_whole = attempt.client.status is ClientStatus.FINISHED
        attempt.prompt.generated(attempt.decode_found if is_whole else None)
        attempt.prompt.close()
        attempt.prompt = SentPrompt()
        self.view.ended(attempt.route.decode_id)

    def _hear_admission(self, attempt: Attempt) -> None:
        if not attempt.is_admitted:
            attempt.is_admitted = True
            if not attempt.is_closed:
                self.waits.leave(attempt)
            route = attempt.route
            self.view.admitted(route.decode_id, route.decode_blocks, route.must_wait, attempt.local_tokens)
            if route.prefill_id is not None:
                self.view.prompt_came(route.prefill_id, attempt.computed_tokens)

    # -- sending -----------------------------------------------------------------------------------

    def _call(self, attempt: Attempt, now_s: float, action: Action) -> None:
        """It is at the replica a little later."""
        self._at(now_s + self._costs.control.call_s, attempt.client, action)

    def _at(self, time_s: float, client: Client, action: Action) -> None:
        self._queue.at(time_s, Order.MESSAGE, client.job.index, action)
