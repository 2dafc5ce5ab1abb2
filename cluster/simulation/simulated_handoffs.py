"""KV that a simulated engine reads from others, as in replicas.engine.handoffs. What it offers has only a lease.

A prompt of several chunks comes in parts, each of which is read while the next one is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.simulation.client import Attempt
from cluster.simulation.cost_model import CostModel
from cluster.simulation.engine_outlet import EngineOutlet
from cluster.simulation.event_queue import Action, EventQueue, Order
from cluster.simulation.simulated_device import SimulatedDevice
from scheduler.generated_token import Token
from scheduler.scheduler import Scheduler


@dataclass(slots=True)
class _Reading:
    """Tokens of a prompt whose KV the source has told of, and those that are here or being read (None: there is no
    memory for them yet)."""

    attempt: Attempt
    num_told: int = 0
    num_ordered: int | None = None
    is_reading: bool = False

    @property
    def is_told(self) -> bool:
        return self.num_told == self.attempt.prompt_len


class SimulatedHandoffs:
    """post: puts a message into the engine's inbox."""

    def __init__(
        self,
        key: int,
        scheduler: Scheduler,
        device: SimulatedDevice,
        costs: CostModel,
        queue: EventQueue,
        outlet: EngineOutlet,
        post: Callable[[Action, float], None],
    ) -> None:
        self._key, self._scheduler, self._device, self._costs = key, scheduler, device, costs
        self._queue, self._outlet, self._post = queue, outlet, post
        self._reads_end_s: dict[str, float] = {}  # of those from each source, in order of arrival
        self._open: dict[str, _Reading] = {}  # by request id

    def part_arrived(self, attempt: Attempt, num_blocks: int | None, now_s: float) -> None:
        """The source has so many blocks more of the prompt's KV, or the rest of it (None): they are read, unless nobody
        wants them any more. Between iterations, as on a thread of its own."""
        reading = self._open.get(attempt.request_id)
        if reading is None:
            reading = self._open[attempt.request_id] = _Reading(attempt)
            self._post(lambda at_s: self._begin(reading, at_s), now_s)
        rest = attempt.prompt_len - reading.num_told
        reading.num_told += rest if num_blocks is None else num_blocks * self._scheduler.limits.block_size
        self._go_on(reading, now_s)

    def cancelled(self, request_id: str, now_s: float) -> None:
        """Nobody wants it any more: what is being read ends first. Within an iteration."""
        reading = self._open.get(request_id)
        if reading is not None and not reading.is_reading:
            self._let_go(reading, now_s)

    def _begin(self, reading: _Reading, now_s: float) -> None:
        """Memory for what the first part told of, and for all that follows. Within an iteration."""
        request_id = reading.attempt.request_id
        if self._scheduler.get(request_id) is None:
            self._let_go(reading, now_s)
            return
        load = self._scheduler.begin_load(request_id, now_s)
        reading.num_ordered = load.num_kept * self._scheduler.limits.block_size
        self._go_on(reading, now_s)

    def _go_on(self, reading: _Reading, now_s: float) -> None:
        """One read of it is open at a time; the last one ends with the source's word, also one of nothing."""
        ordered = reading.num_ordered
        if ordered is None or reading.is_reading or not (reading.num_told > ordered or reading.is_told):
            return
        source = reading.attempt.route.prefill_id
        assert source is not None
        num_tokens = max(0, reading.num_told - ordered)
        reading.num_ordered, reading.is_reading = max(ordered, reading.num_told), True
        end_s = max(now_s, self._reads_end_s.get(source, 0.0)) + self._costs.read_s(num_tokens)
        self._reads_end_s[source] = end_s
        is_last = reading.is_told
        self._queue.at(
            end_s, Order.MESSAGE, self._key, lambda at_s: self._read_ended(reading, num_tokens, is_last, at_s)
        )

    def _read_ended(self, reading: _Reading, num_tokens: int, is_last: bool, now_s: float) -> None:
        reading.is_reading = False
        if self._costs.digest_s(num_tokens):
            self._post(lambda at_s: self._verify(num_tokens, at_s), now_s)
        if is_last or self._scheduler.get(reading.attempt.request_id) is None:
            self._let_go(reading, now_s)
        else:
            self._go_on(reading, now_s)

    def _verify(self, num_tokens: int, now_s: float) -> None:
        """Its own digests of what was read, before any step that attends to it. Within an iteration."""
        self._device.digest(num_tokens, now_s)

    def _let_go(self, reading: _Reading, now_s: float) -> None:
        """All is here, or will never be."""
        attempt = reading.attempt
        self._open.pop(attempt.request_id, None)
        self._outlet.release(attempt, now_s)
        if reading.num_ordered is not None:
            self._post(lambda at_s: self._released(attempt, at_s), now_s)

    def _released(self, attempt: Attempt, now_s: float) -> None:
        if self._scheduler.get(attempt.request_id) is None:
            self._scheduler.transfer_ended(attempt.request_id)
        else:
            first = Token(attempt.request_id, 0, 0, attempt.token(0), None)
            self._scheduler.kv_ready(attempt.request_id, (first,), now_s)
