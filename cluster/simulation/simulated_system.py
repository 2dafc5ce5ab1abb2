"""Routers and replicas of one simulated system, and what passes between them.

What it leaves out: failures, retries of anything but evictions, the load on the control path itself, prefix caching,
requests of several choices. All routers hear every frame's load; real ones that have nothing in a frame hear it
up to half a second later.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.simulation.client import Attempt, Client, Job
from cluster.simulation.cost_model import CostModel
from cluster.simulation.event_queue import EventQueue, Order
from cluster.simulation.gap_histogram import GapHistogram
from cluster.simulation.shared_machine import SharedMachine
from cluster.simulation.simulated_decode import SimulatedDecode, SimulatedFrame
from cluster.simulation.simulated_prefill import SimulatedPrefill
from cluster.simulation.simulated_router import SimulatedRouter
from cluster.simulation.system_shape import PoolShape, SystemShape
from replicas.messages import EngineLoad
from scheduler.capabilities import DECODE, PREFILL
from scheduler.outcome import PromptDone
from scheduler.scheduler import Scheduler

DecodeMaker = Callable[[SystemShape], Scheduler]


@dataclass(frozen=True, slots=True)
class KvSample:
    """Shares of KV blocks in use at one time, over all replicas of a pool. prefill_mean is 0 when colocated."""

    time_s: float
    decode_mean: float
    decode_max: float
    prefill_mean: float
    num_queued: int  # on decode replicas, for memory or a slot
    num_running: int


@dataclass(slots=True)
class SystemRun:
    """What a run leaves behind."""

    clients: list[Client] = field(default_factory=list)
    gaps: GapHistogram = field(default_factory=GapHistogram)
    samples: list[KvSample] = field(default_factory=list)


def shipped_decode(shape: SystemShape) -> Scheduler:
    """The decode scheduler as replicas.serving.engine_builder makes it."""
    return Scheduler(shape.decode.limits, DECODE, shape.admission, shape.decode.lag, shape.num_host_blocks)


class SimulatedSystem:
    """Use once. may_skip: take steady decode steps many at once; the results are the same, only sooner."""

    def __init__(
        self,
        shape: SystemShape,
        costs: CostModel,
        *,
        may_skip: bool = True,
        make_decode: DecodeMaker = shipped_decode,
    ) -> None:
        self.shape, self.costs = shape, costs
        self.queue = EventQueue()
        self._machine, self._make_decode, self._may_skip = SharedMachine(), make_decode, may_skip
        self._num_made = 0
        # All that there ever were; and of those that take work, what routers are told.
        self.decodes: dict[str, SimulatedDecode] = {}
        self.prefills: dict[str, SimulatedPrefill] = {}
        self.decode_table: dict[str, Mapping[str, Any]] = {}
        self.prefill_table: dict[str, Mapping[str, Any]] = {}
        self.routers: list[SimulatedRouter] = []
        for _ in range(shape.decode.num_replicas):
            self.add_decode()
        for _ in range(shape.prefill.num_replicas if shape.prefill else 0):
            self.add_prefill()
        self.routers = [
            SimulatedRouter(
                index,
                shape.decode.limits.block_size,
                shape.rules,
                shape.times,
                costs,
                self.queue,
                self.decodes,
                self.prefills,
                self.decode_table,
                self.prefill_table,
            )
            for index in range(shape.num_routers)
        ]
        self._wake_routers()
        self._run = SystemRun()
        self._num_over = 0

    # -- replicas come and go ----------------------------------------------------------------------

    def add_decode(self) -> str:
        """One that takes work from now on; returns its name. Mutates."""
        pool, name = self.shape.decode, f"decode-{len(self.decodes):04d}"
        decode = SimulatedDecode(
            name,
            self._num_made,
            self._make_decode(self.shape),
            self.costs.decode,
            self.costs,
            self.queue,
            self._machine,
        )
        decode.on_frame, decode.on_load_ended = self._frame_sender(name, decode.key), self._load_ended
        decode.may_skip = self._may_skip
        decode.prepare()
        self._num_made += 1
        self.decodes[name] = decode
        self.decode_table[name] = self._metadata(pool)
        self._wake_routers()
        return name

    def add_prefill(self) -> str:
        """As add_decode."""
        pool, name = self.shape.prefill, f"prefill-{len(self.prefills):04d}"
        assert pool is not None, "colocated"
        prefill = SimulatedPrefill(
            name,
            self._num_made,
            Scheduler(pool.limits, PREFILL, lag=pool.lag),
            self.costs.prefill,
            self.costs,
            self.queue,
            self._machine,
        )
        prefill.on_done = self._prompt_done
        self._num_made += 1
        self.prefills[name] = prefill
        self.prefill_table[name] = self._metadata(pool)
        self._wake_routers()
        return name

    def retire(self, name: str) -> None:
        """It takes no new work; what it has goes on to its end. Mutates. Raises KeyError."""
        table = self.decode_table if name in self.decode_table else self.prefill_table
        del table[name]

    def _metadata(self, pool: PoolShape) -> Mapping[str, Any]:
        """What routers are told of a replica; all have the same model."""
        limits = pool.limits
        peer = {"fingerprint": "", "block_bytes": limits.block_size * self.costs.kv_bytes_per_token}
        return {"num_blocks": limits.num_blocks, "step_tokens": limits.max_step_tokens, "peer": peer}

    def _wake_routers(self) -> None:
        for router in self.routers:
            router.wake(self.queue.now_s)

    @property
    def is_over(self) -> bool:
        """Whether every job has ended, one way or the other."""
        clients = self._run.clients
        while self._num_over < len(clients) and clients[self._num_over].is_over:
            self._num_over += 1
        return self._num_over == len(clients)

    def run(self, jobs: Sequence[Job], sample_interval_s: float | None = None) -> SystemRun:
        """Every job to its end. jobs: by arrival, job i with index i. Blocks."""
        run = self._run = SystemRun([Client(job) for job in jobs])
        self._num_over = 0
        if run.clients:
            self._arrive_at(0)
            if sample_interval_s is not None:
                self._sample_at(run.clients[0].job.arrival_s, sample_interval_s)
        was_collecting = gc.isenabled()
        gc.disable()  # everything lives until the end; looking for garbage among it takes more than half of the time
        try:
            self.queue.run()
        finally:
            if was_collecting:
                gc.enable()
        for decode in self.decodes.values():
            run.gaps.merge(decode.gaps)
        return run

    # -- arrivals and samples ----------------------------------------------------------------------

    def _arrive_at(self, index: int) -> None:
        job = self._run.clients[index].job
        self.queue.at(job.arrival_s + self.costs.control.ingress_s, Order.MESSAGE, index, self._arrive(index))

    def _arrive(self, index: int) -> Callable[[float], None]:
        def arrive(now_s: float) -> None:
            client = self._run.clients[index]
            self._router_of(client).arrive(client, now_s)
            if index + 1 < len(self._run.clients):
                self._arrive_at(index + 1)

        return arrive

    def _router_of(self, client: Client) -> SimulatedRouter:
        return self.routers[client.job.index % len(self.routers)]

    def _sample_at(self, time_s: float, interval_s: float) -> None:
        def sample(now_s: float) -> None:
            self._run.samples.append(self._sample(now_s))
            if not self.is_over:
                self._sample_at(now_s + interval_s, interval_s)

        self.queue.at(time_s, Order.SAMPLE, 0, sample)

    def _sample(self, now_s: float) -> KvSample:
        for decode in self.decodes.values():
            decode.settle(now_s)
        decodes = [self.decodes[name].num_used_blocks for name in self.decode_table]
        prefills = [self.prefills[name].num_used_blocks for name in self.prefill_table]
        num_blocks = self.shape.decode.limits.num_blocks
        prefill_blocks = self.shape.prefill.limits.num_blocks if self.shape.prefill else 1
        return KvSample(
            time_s=now_s,
            decode_mean=sum(decodes) / len(decodes) / num_blocks if decodes else 0.0,
            decode_max=max(decodes, default=0) / num_blocks,
            prefill_mean=sum(prefills) / len(prefills) / prefill_blocks if prefills else 0.0,
            num_queued=sum(engine.scheduler.num_queued for engine in self.decodes.values()),
            num_running=sum(engine.scheduler.num_running for engine in self.decodes.values()),
        )

    # -- between the replicas ----------------------------------------------------------------------

    def _frame_sender(self, replica_id: str, key: int) -> Callable[[SimulatedFrame, float], None]:
        def send(frame: SimulatedFrame, now_s: float) -> None:
            heard_s = now_s + self.costs.control.frame_s
            for attempt in frame.first_tokens:
                _first_token(attempt, heard_s + self.costs.control.stream_s)
            self.queue.at(heard_s, Order.MESSAGE, key, lambda at_s: self._deliver(replica_id, frame, at_s))

        return send

    def _deliver(self, replica_id: str, frame: SimulatedFrame, now_s: float) -> None:
        load = frame.load
        if load is not None:
            for router in self.routers:
                router.heard(replica_id, load)
        for router in self.routers:
            part = frame if len(self.routers) == 1 else self._part_of(frame, router)
            router.on_frame(part, now_s)

    def _part_of(self, frame: SimulatedFrame, router: SimulatedRouter) -> SimulatedFrame:
        def theirs(attempts: list[Attempt]) -> list[Attempt]:
            return [attempt for attempt in attempts if self._router_of(attempt.client) is router]

        return SimulatedFrame(
            admitted=theirs(frame.admitted), finished=theirs(frame.finished), evicted=theirs(frame.evicted)
        )

    def _prompt_done(self, attempt: Attempt, done: PromptDone, load: EngineLoad, now_s: float) -> None:
        client, control = attempt.client, self.costs.control
        if client.num_tokens:  # a replay: its last token came from elsewhere
            self._run.gaps.add(now_s - attempt.last_token_s)
        attempt.num_tokens += 1
        attempt.last_token_s = now_s
        reply_s = now_s + control.call_s
        _first_token(attempt, reply_s + control.stream_s)
        is_over = not done.block_ids
        router = self._router_of(client)
        self.queue.at(
            reply_s,
            Order.MESSAGE,
            client.job.index,
            lambda at_s: router.prompt_done(attempt, load, is_over, at_s),
        )
        if not is_over:
            decode = self.decodes[attempt.route.decode_id]
            self.queue.at(
                now_s + self.costs.transfer.notify_s,
                Order.MESSAGE,
                decode.key,
                lambda at_s: decode.post(at_s, lambda taken_s: decode.handoff(attempt, taken_s)),
            )

    def _load_ended(self, attempt: Attempt, now_s: float) -> None:
        """Decode is done with the source's blocks, or does not want them."""
        assert attempt.route.prefill_id is not None
        prefill = self.prefills[attempt.route.prefill_id]
        self._router_of(attempt.client).handed_over(attempt)
        self.queue.at(
            now_s + self.costs.transfer.notify_s,
            Order.MESSAGE,
            prefill.key,
            lambda at_s: prefill.post(at_s, lambda taken_s: prefill.lease_ended(attempt.request_id, taken_s)),
        )


def _first_token(attempt: Attempt, time_s: float) -> None:
    """It is at the client then."""
    if not attempt.client.first_s:
        attempt.client.first_s = time_s
