"""KV that a simulated engine reads from others, as in replicas.engine.handoffs. What it offers has only a lease."""

from __future__ import annotations

from collections.abc import Callable

from cluster.simulation.client import Attempt
from cluster.simulation.cost_model import CostModel
from cluster.simulation.engine_outlet import EngineOutlet
from cluster.simulation.event_queue import Action, EventQueue, Order
from scheduler.generated_token import Token
from scheduler.scheduler import Scheduler


class SimulatedHandoffs:
    """post: puts a message into the engine's inbox."""

    def __init__(
        self,
        key: int,
        scheduler: Scheduler,
        costs: CostModel,
        queue: EventQueue,
        outlet: EngineOutlet,
        post: Callable[[Action, float], None],
    ) -> None:
        self._key, self._scheduler, self._costs = key, scheduler, costs
        self._queue, self._outlet, self._post = queue, outlet, post
        self._reads_end_s: dict[str, float] = {}  # of those from each source, in order of arrival

    def arrived(self, attempt: Attempt, now_s: float) -> None:
        """The source has the KV: read it, unless nobody wants it any more. Within an iteration."""
        if self._scheduler.get(attempt.request_id) is None:
            self._outlet.release(attempt, now_s)
            return
        load = self._scheduler.begin_load(attempt.request_id, now_s)
        num_tokens = max(0, attempt.prompt_len - load.num_kept * self._scheduler.limits.block_size)
        source = attempt.route.prefill_id
        assert source is not None
        end_s = max(now_s, self._reads_end_s.get(source, 0.0)) + self._costs.read_s(num_tokens)
        self._reads_end_s[source] = end_s
        self._queue.at(end_s, Order.MESSAGE, self._key, lambda at_s: self._read_ended(attempt, at_s))

    def _read_ended(self, attempt: Attempt, now_s: float) -> None:
        self._outlet.release(attempt, now_s)
        self._post(lambda at_s: self._kv_ready(attempt, at_s), now_s)

    def _kv_ready(self, attempt: Attempt, now_s: float) -> None:
        if self._scheduler.get(attempt.request_id) is None:
            self._scheduler.transfer_ended(attempt.request_id)
        else:
            first = Token(attempt.request_id, 0, 0, attempt.token(0), None)
            self._scheduler.kv_ready(attempt.request_id, (first,), now_s)
