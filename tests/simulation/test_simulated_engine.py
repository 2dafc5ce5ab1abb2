"""One simulated engine, whatever its scheduler can do: here everything, each of two for the other and for itself."""

from __future__ import annotations

from functools import partial

import pytest

from cluster.policies.routing_policy import Route, RouteKind
from cluster.simulation.client import Attempt, Client, Job
from cluster.simulation.event_queue import Action, EventQueue, Order
from cluster.simulation.shared_machine import SharedMachine
from cluster.simulation.simulated_device import SimulatedDevice
from cluster.simulation.simulated_engine import SimulatedEngine
from cluster.simulation.simulated_frame import SimulatedFrame
from replicas.messages import EngineLoad
from scheduler.capabilities import Capabilities
from scheduler.outcome import PromptDone, PromptPart
from scheduler.pool_limits import PoolLimits
from scheduler.scheduler import Scheduler
from tests.simulation.small_system import COSTS, random_jobs

NAMES = ("a", "b")


class Wires:
    """Two engines, and what they tell each other. Frames are kept."""

    def __init__(self, lag: int, may_skip: bool) -> None:
        self.queue = EventQueue()
        self.frames: list[tuple[str, SimulatedFrame]] = []
        self.num_handoffs = self.num_parts = 0
        everything = Capabilities(computes=True, decodes=True, offers=True, reads=True)
        limits, machine = PoolLimits(256, 16, 16, 256), SharedMachine()
        self.engines = {
            name: SimulatedEngine(
                name,
                key,
                Scheduler(limits, everything, lag=lag),
                SimulatedDevice("decode", key, COSTS.decode, COSTS, machine, limits.block_size),
                COSTS,
                self.queue,
                self,
                may_skip=may_skip,
            )
            for key, name in enumerate(NAMES)
        }

    def send_frame(self, replica_id: str, frame: SimulatedFrame, now_s: float) -> None:
        self.frames.append((replica_id, frame))
        for attempt in frame.admitted:
            if attempt.route.prefill_id is not None:
                source = self.engines[attempt.route.prefill_id]
                self._notify(source, now_s, partial(source.prefill, attempt, 1e6))

    def answer_prompt(self, attempt: Attempt, done: PromptDone, load: EngineLoad, now_s: float, ready_s: float) -> None:
        attempt.num_tokens, attempt.last_token_s = 1, now_s
        decode = self.engines[attempt.route.decode_id]
        if done.block_ids:
            self.num_handoffs += 1
            self._notify(decode, ready_s, partial(decode.handoff, attempt, None))
        else:
            self._notify(decode, now_s, partial(decode.cancel, attempt.request_id))

    def offer_part(self, attempt: Attempt, part: PromptPart, ready_s: float) -> None:
        self.num_parts += 1
        decode = self.engines[attempt.route.decode_id]
        self._notify(decode, ready_s, partial(decode.handoff, attempt, len(part.block_ids)))

    def release(self, attempt: Attempt, now_s: float) -> None:
        assert attempt.route.prefill_id is not None
        source = self.engines[attempt.route.prefill_id]
        self._notify(source, now_s, partial(source.lease_ended, attempt.request_id))

    def _notify(self, engine: SimulatedEngine, now_s: float, action: Action) -> None:
        self.queue.at(now_s + COSTS.transfer.notify_s, Order.MESSAGE, engine.key, action)


def attempt_of(job: Job) -> Attempt:
    """In turn: a's prompt for b, b's for a, one that stays with either."""
    here, there = NAMES[job.index % 2], NAMES[1 - job.index % 2]
    is_local = job.index % 3 == 0
    route = Route(RouteKind.LOCAL, here, None, False, 0) if is_local else Route(RouteKind.REMOTE, there, here, False, 0)
    return Attempt(Client(job), route, f"{job.index}", job.prompt_len, job.output_len, job.max_tokens)


def run(lag: int, may_skip: bool) -> tuple[Wires, list[Attempt]]:
    wires = Wires(lag, may_skip)
    attempts = [attempt_of(job) for job in random_jobs(11, 60, 4.0)]
    for attempt in attempts:
        job, decode = attempt.client.job, wires.engines[attempt.route.decode_id]
        wires.queue.at(job.arrival_s, Order.MESSAGE, job.index, partial(decode.generate, attempt, 1e6))
    wires.queue.run()
    return wires, attempts


@pytest.mark.parametrize("lag", [0, 1])
def test_engines_that_can_do_everything(lag: int) -> None:
    wires, attempts = run(lag, may_skip=True)
    assert all(attempt.num_tokens == attempt.output_len for attempt in attempts)
    assert wires.num_handoffs > 20
    assert wires.num_parts > 2
    finished = {attempt.request_id for _, frame in wires.frames for attempt in frame.finished}
    assert finished == {a.request_id for a in attempts if a.is_local or a.output_len > 1}
    told = {attempt.request_id for _, frame in wires.frames for attempt in frame.admitted}
    assert told == {attempt.request_id for attempt in attempts}
    for name, engine in wires.engines.items():
        assert engine.is_idle
        assert engine.counts.num_prompt_tokens > 0
        assert engine.counts.num_skipped_steps > 0
        assert any(sender == name and frame.first_tokens for sender, frame in wires.frames)
        engine.scheduler.allocator.check_integrity()


@pytest.mark.parametrize("lag", [0, 1])
def test_the_shortcut_changes_nothing_there_either(lag: int) -> None:
    (quick, ours), (slow, theirs) = run(lag, may_skip=True), run(lag, may_skip=False)
    assert [(a.num_tokens, a.last_token_s) for a in ours] == [(a.num_tokens, a.last_token_s) for a in theirs]
    for name, engine in quick.engines.items():
        assert engine.calls.gaps == slow.engines[name].calls.gaps
        assert engine.counts.num_steps == slow.engines[name].counts.num_steps
        assert slow.engines[name].counts.num_skipped_steps == 0
