"""What the replicas of a simulated system tell its routers and each other, and when it is heard."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping

from cluster.simulation.client import Attempt, Client
from cluster.simulation.cost_model import CostModel
from cluster.simulation.event_queue import Action, EventQueue, Order
from cluster.simulation.gap_histogram import GapHistogram
from cluster.simulation.simulated_engine import SimulatedEngine
from cluster.simulation.simulated_frame import SimulatedFrame
from cluster.simulation.simulated_router import SimulatedRouter
from replicas.messages import EngineLoad
from scheduler.outcome import PromptDone, PromptPart


class SimulatedNetwork:
    """The outlet of all engines. routers: in the order of their index. gaps: before tokens of the prefill pool."""

    def __init__(
        self,
        queue: EventQueue,
        costs: CostModel,
        decodes: MutableMapping[str, SimulatedEngine],
        prefills: MutableMapping[str, SimulatedEngine],
    ) -> None:
        """decodes, prefills: all that there are or were."""
        self.routers: list[SimulatedRouter] = []
        self.gaps = GapHistogram()
        self._queue, self._costs = queue, costs
        self._engines = ChainMap(decodes, prefills)

    def router_of(self, client: Client) -> SimulatedRouter:
        """Requests go to routers in turn."""
        return self.routers[client.job.index % len(self.routers)]

    # -- from engines to routers -------------------------------------------------------------------

    def send_frame(self, replica_id: str, frame: SimulatedFrame, now_s: float) -> None:
        """To all of them, and its first tokens on to the clients."""
        heard_s = now_s + self._costs.control.frame_s
        for attempt in frame.first_tokens:
            _first_token(attempt, heard_s + self._costs.control.stream_s)
        key = self._engines[replica_id].key
        self._queue.at(heard_s, Order.MESSAGE, key, lambda at_s: self._deliver(replica_id, frame, at_s))

    def _deliver(self, replica_id: str, frame: SimulatedFrame, now_s: float) -> None:
        load = frame.load
        if load is not None:
            for router in self.routers:
                router.heard(replica_id, load)
        for router in self.routers:
            router.on_frame(frame if len(self.routers) == 1 else self._part(frame, router), now_s)

    def _part(self, frame: SimulatedFrame, router: SimulatedRouter) -> SimulatedFrame:
        return frame.part(lambda attempt: self.router_of(attempt.client) is router)

    def answer_prompt(self, attempt: Attempt, done: PromptDone, load: EngineLoad, now_s: float, ready_s: float) -> None:
        """To its router, with the first token; and its decode replica is told where the KV is."""
        client, control = attempt.client, self._costs.control
        if client.num_tokens:  # a replay: its last token came from elsewhere
            self.gaps.add(now_s - attempt.last_token_s)
        attempt.num_tokens += 1
        attempt.last_token_s = now_s
        reply_s = now_s + control.call_s
        _first_token(attempt, reply_s + control.stream_s)
        is_over, router = not done.block_ids, self.router_of(client)
        self._queue.at(
            reply_s,
            Order.MESSAGE,
            client.job.index,
            lambda at_s: router.prompt_done(attempt, load, is_over, at_s),
        )
        if not is_over:
            decode = self._engines[attempt.route.decode_id]
            self._notify(decode, ready_s, lambda at_s: decode.handoff(attempt, None, at_s))

    # -- from engines to engines -------------------------------------------------------------------

    def offer_part(self, attempt: Attempt, part: PromptPart, ready_s: float) -> None:
        """To its decode replica."""
        decode, num_blocks = self._engines[attempt.route.decode_id], len(part.block_ids)
        self._notify(decode, ready_s, lambda at_s: decode.handoff(attempt, num_blocks, at_s))

    def release(self, attempt: Attempt, now_s: float) -> None:
        """The source is told."""
        assert attempt.route.prefill_id is not None
        prefill = self._engines[attempt.route.prefill_id]
        self.router_of(attempt.client).handed_over(attempt)
        self._notify(prefill, now_s, lambda at_s: prefill.lease_ended(attempt.request_id, at_s))

    def _notify(self, engine: SimulatedEngine, now_s: float, action: Action) -> None:
        self._queue.at(now_s + self._costs.transfer.notify_s, Order.MESSAGE, engine.key, action)


def _first_token(attempt: Attempt, time_s: float) -> None:
    """It is at the client then."""
    if not attempt.client.first_s:
        attempt.client.first_s = time_s
