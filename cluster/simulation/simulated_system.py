"""Routers and replicas of one simulated system, its clients, and what is looked at while it runs.

What it leaves out: failures, retries of anything but evictions, the load on the control path itself, requests of
several choices, what answers leave in prefix caches (no recorded prompt holds an answer's tokens). All routers hear
every frame's load; real ones that have nothing in a frame hear it up to half a second later.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cluster.simulation.client import Client, Job
from cluster.simulation.cost_model import CostModel
from cluster.simulation.event_queue import EventQueue, Order
from cluster.simulation.gap_histogram import GapHistogram
from cluster.simulation.shared_machine import SharedMachine
from cluster.simulation.simulated_device import SimulatedDevice
from cluster.simulation.simulated_engine import SimulatedEngine
from cluster.simulation.simulated_lanes import DividedDevice, LaneDivision, SimulatedTwoLanes
from cluster.simulation.simulated_network import SimulatedNetwork
from cluster.simulation.simulated_pool import SimulatedPool
from cluster.simulation.simulated_router import SimulatedRouter
from cluster.simulation.system_shape import PoolShape, SystemShape
from replicas.pool_size import keeps_prefixes_on_host
from scheduler.admission import AdmissionPolicy
from scheduler.capabilities import BOTH, DECODE, PREFILL
from scheduler.prefix_book import PrefixOptions
from scheduler.recent_keys import RecentKeys
from scheduler.scheduler import Scheduler

DecodeMaker = Callable[[SystemShape, PrefixOptions | None], Scheduler]

# How often each router looks whom it is to ask what is cached there.
_PULSE_S = 0.2


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


def shipped_decode(shape: SystemShape, prefixes: PrefixOptions | None) -> Scheduler:
    """The decode scheduler as replicas.serving.engine_builder makes it."""
    has_two_lanes, num_host_blocks = shape.decode.lanes is not None, shape.num_host_blocks
    limits, lag = shape.decode.limits, shape.decode.lag
    speculation = None if shape.decode.drafts is None else shape.decode.drafts.speculation()
    capabilities = BOTH if shape.decode.may_also else DECODE
    return Scheduler(limits, capabilities, shape.admission, lag, num_host_blocks, has_two_lanes, prefixes, speculation)


def _shipped_prefill(
    pool: PoolShape, admission: AdmissionPolicy, num_host_blocks: int, prefixes: PrefixOptions | None
) -> Scheduler:
    num_host_blocks = num_host_blocks if prefixes is not None else 0
    if pool.may_also:
        return Scheduler(pool.limits, BOTH, admission, pool.lag, num_host_blocks, prefixes=prefixes)
    return Scheduler(pool.limits, PREFILL, None, pool.lag, num_host_blocks, prefixes=prefixes)


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
        self._machine, self._may_skip = SharedMachine(), may_skip
        token_bytes = costs.kv_bytes_per_token
        make = partial(make_decode, shape)
        decode = SimulatedPool("decode", shape.decode.limits, token_bytes, costs.decode, make, shape.decode.may_also)
        self.pools = {decode.name: decode}
        prefill = None
        if shape.prefill is not None:
            may_also = shape.prefill.may_also
            make = partial(_shipped_prefill, shape.prefill, shape.admission, shape.num_prefill_host_blocks)
            steps = costs.decode if may_also else costs.prefill
            prefill = SimulatedPool("prefill", shape.prefill.limits, token_bytes, steps, make, may_also)
            self.pools[prefill.name] = prefill
        # All that there ever were.
        self.decodes: Mapping[str, SimulatedEngine] = decode.engines
        self.prefills: Mapping[str, SimulatedEngine] = prefill.engines if prefill else {}
        self.network = SimulatedNetwork(self.queue, costs, self.decodes, self.prefills)
        for _ in range(shape.decode.num_replicas):
            self.add("decode")
        for _ in range(shape.prefill.num_replicas if shape.prefill else 0):
            self.add("prefill")
        block_size, rules, times = shape.decode.limits.block_size, shape.rules, shape.times
        self.network.routers += [
            SimulatedRouter(index, block_size, rules, times, costs, self.queue, decode, prefill, shape.has_prefix_cache)
            for index in range(shape.num_routers)
        ]
        for router in self.routers:
            router.pools_changed()
        self._run = SystemRun()
        self._num_over = 0
        self._on_sample: Callable[[int], None] | None = None

    # -- replicas come and go ----------------------------------------------------------------------

    def add(self, pool: str) -> str:
        """A replica that takes work from now on; its name. Mutates. Raises KeyError for a pool that there is not."""
        theirs = self.pools[pool]
        name, key = theirs.next_name, sum(len(other.engines) for other in self.pools.values())
        theirs.add(self._make_engine(theirs, name, key))
        for router in self.routers:
            router.pools_changed()
            router.wake(self.queue.now_s)
        return name

    def _make_engine(self, pool: SimulatedPool, name: str, key: int) -> SimulatedEngine:
        log = RecentKeys(name) if self.shape.has_prefix_cache else None
        uses_host = keeps_prefixes_on_host(pool.name, "split" if self.shape.prefill else "colocated")
        options = None if log is None else PrefixOptions("", on_piece=log.append, uses_host=uses_host)
        scheduler = pool.make_scheduler(options)
        engine = self._engine_around(scheduler, pool, name, key)
        engine.recent_keys = log
        return engine

    def _engine_around(self, scheduler: Scheduler, pool: SimulatedPool, name: str, key: int) -> SimulatedEngine:
        shape = self.shape.decode
        drafts = shape.drafts if scheduler.drafts is not None else None
        of_device = pool.name, key, pool.steps, self.costs, self._machine, pool.limits.block_size, drafts
        of_engine = self.costs, self.queue, self.network
        if scheduler.has_two_lanes and shape.lanes is not None:
            divided = DividedDevice(*of_device)
            division = LaneDivision(shape.lanes, shape.shares, shape.chooser)
            return SimulatedTwoLanes(name, key, scheduler, divided, *of_engine, division)
        return SimulatedEngine(name, key, scheduler, SimulatedDevice(*of_device), *of_engine, may_skip=self._may_skip)

    @property
    def routers(self) -> Sequence[SimulatedRouter]:
        return self.network.routers

    @property
    def is_over(self) -> bool:
        """Whether every job has ended, one way or the other."""
        clients = self._run.clients
        while self._num_over < len(clients) and clients[self._num_over].is_over:
            self._num_over += 1
        return self._num_over == len(clients)

    def run(
        self,
        jobs: Sequence[Job],
        sample_interval_s: float | None = None,
        on_sample: Callable[[int], None] | None = None,
    ) -> SystemRun:
        """Every job to its end. jobs: by arrival, job i with index i. on_sample: told with each sample how many jobs
        have ended, all before them too. Blocks."""
        self._on_sample = on_sample
        run = self._run = SystemRun([Client(job) for job in jobs])
        self._num_over = 0
        if run.clients:
            self._arrive_at(0)
            for index, router in enumerate(self.routers if self.shape.has_prefix_cache else ()):
                self._pulse_at(run.clients[0].job.arrival_s + _PULSE_S * index / len(self.routers), router)
            if sample_interval_s is not None:
                self._sample_at(run.clients[0].job.arrival_s, sample_interval_s)
        was_collecting = gc.isenabled()
        gc.disable()  # everything lives until the end; looking for garbage among it takes more than half of the time
        try:
            self.queue.run()
        finally:
            if was_collecting:
                gc.enable()
        run.gaps.merge(self.network.gaps)
        for engine in (*self.decodes.values(), *self.prefills.values()):
            run.gaps.merge(engine.calls.gaps)
        return run

    # -- arrivals and samples ----------------------------------------------------------------------

    def _arrive_at(self, index: int) -> None:
        job = self._run.clients[index].job
        self.queue.at(job.arrival_s + self.costs.control.ingress_s, Order.MESSAGE, index, self._arrive(index))

    def _arrive(self, index: int) -> Callable[[float], None]:
        def arrive(now_s: float) -> None:
            client = self._run.clients[index]
            self.network.router_of(client).arrive(client, now_s)
            if index + 1 < len(self._run.clients):
                self._arrive_at(index + 1)

        return arrive

    def _pulse_at(self, time_s: float, router: SimulatedRouter) -> None:
        def pulse(now_s: float) -> None:
            for pool in self.pools.values():
                for name in router.pulses.due(pool.name, now_s):
                    pool.engines[name].settle(now_s)
                    router.pulses.heard(pool.name, pool.engines[name])
            if not self.is_over:
                self._pulse_at(now_s + _PULSE_S, router)

        self.queue.at(time_s, Order.SAMPLE, 0, pulse)

    def _sample_at(self, time_s: float, interval_s: float) -> None:
        def sample(now_s: float) -> None:
            self._run.samples.append(self._sample(now_s))
            if not self.is_over:
                self._sample_at(now_s + interval_s, interval_s)
            if self._on_sample is not None:
                self._on_sample(self._num_over)

        self.queue.at(time_s, Order.SAMPLE, 0, sample)

    def _sample(self, now_s: float) -> KvSample:
        for decode in self.decodes.values():
            decode.settle(now_s)
        shares = {name: pool.shares_used() for name, pool in self.pools.items()}
        return KvSample(
            now_s,
            *shares["decode"],
            prefill_mean=shares["prefill"][0] if "prefill" in shares else 0.0,
            num_queued=sum(engine.scheduler.num_queued for engine in self.decodes.values()),
            num_running=sum(engine.scheduler.num_running for engine in self.decodes.values()),
        )
