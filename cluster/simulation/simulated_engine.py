"""An engine's loop (scheduler.engine_core) on the simulated clock, driven by messages as replicas.engine.engine is.

An iteration is computed when it begins; what it brings about happens at the times when its steps end. Messages that
come meanwhile wait for the next one, as they wait in a real engine's inbox.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from cluster.simulation.client import Attempt
from cluster.simulation.cost_model import CostModel
from cluster.simulation.event_queue import Action, EventQueue, Order
from cluster.simulation.shared_machine import SharedMachine
from cluster.simulation.step_model import StepModel
from replicas.messages import EngineLoad
from replicas.metrics.engine_status import StepClock
from scheduler.engine_core import EngineCore, Turn
from scheduler.plan import StepOutput, StepPlan
from scheduler.scheduler import Scheduler
from scheduler.step_shape import StepShape


@dataclass(slots=True)
class StepInFlight:
    """request_ids: of its rows, then of the prompts that it completes. end_s: when the device is done with it."""

    step_id: int
    request_ids: tuple[str, ...]
    end_s: float


@dataclass(slots=True)
class EngineCounts:
    """What an engine did. decision_s: CPU time that its scheduler took, the only thing here that is not simulated."""

    num_steps: int = 0
    num_decisions: int = 0  # iterations that were not skipped
    decision_s: float = 0.0
    busy_s: float = 0.0  # in iterations with something to compute
    num_rows: int = 0
    num_prompt_tokens: int = 0


class SimulatedEngine(ABC):
    """One replica. key: its number among all replicas, which settles what comes first at the same instant."""

    pool: str

    def __init__(
        self,
        replica_id: str,
        key: int,
        scheduler: Scheduler,
        steps: StepModel,
        costs: CostModel,
        queue: EventQueue,
        machine: SharedMachine,
    ) -> None:
        self.replica_id, self.key, self.scheduler = replica_id, key, scheduler
        self.core: EngineCore[StepInFlight] = EngineCore(scheduler)
        self.steps, self.costs = steps, costs
        self.counts = EngineCounts()
        self.attempts: dict[str, Attempt] = {}
        self._queue, self._machine = queue, machine
        self._inbox: list[Action] = []
        self._device_free_s = 0.0
        self._prompt_clock = StepClock()  # only steps that compute prompts
        self._wake_number = 0
        self._is_idle = True
        self._block_tokens = scheduler.limits.block_size

    # -- messages ----------------------------------------------------------------------------------

    def post(self, now_s: float, action: Action) -> None:
        """A message arrives: it is taken when the next iteration begins."""
        self._inbox.append(action)
        if self._is_idle:
            self._wake_at(now_s)

    def _wake_at(self, time_s: float) -> None:
        """Replaces any other wake-up."""
        self._wake_number += 1
        number = self._wake_number
        self._queue.at(time_s, Order.WAKE, self.key, lambda now_s: self._wake(now_s, number))

    def _wake(self, now_s: float, number: int) -> None:
        if number == self._wake_number:
            self._is_idle = False
            self._iterate(now_s)

    # -- the loop ----------------------------------------------------------------------------------

    def _iterate(self, begin_s: float) -> None:
        now_s = begin_s
        inbox, self._inbox = self._inbox, []
        for action in inbox:
            action(now_s)
        started = time.thread_time()
        turn = self.core.turn(now_s)  # of one whose time is up, its router knows at the same time
        self.counts.decision_s += time.thread_time() - started
        self.counts.num_decisions += 1
        self._on_turn(turn)
        if turn.plan is not None:
            self.core.launched(self._launch(turn.plan, now_s))
        has_committed = bool(self.core.in_flight)
        for step in self.core.due(turn):
            now_s = max(now_s, step.end_s)
            self._commit(step, now_s)
        self._flush(now_s)
        if turn.plan is None and not has_committed:
            self._sleep(now_s)
        else:
            next_s = now_s + self.steps.overhead_s
            self.counts.busy_s += next_s - begin_s
            self._go_on(next_s)

    def _go_on(self, next_s: float) -> None:
        """The next iteration begins at next_s."""
        self._wake_at(next_s)

    def _sleep(self, now_s: float) -> None:
        self._is_idle = True
        deadline_s = self.scheduler.next_deadline_s
        if deadline_s is not None:
            self._wake_at(max(now_s, deadline_s))

    def _launch(self, plan: StepPlan, now_s: float) -> StepInFlight:
        shape = StepShape.of(plan)
        step_s = self._swap_s(plan) if plan.is_empty else self.steps.step_s(*shape) + self._swap_s(plan)
        start_s = max(now_s, self._device_free_s)
        end_s = start_s + step_s
        if self.costs.is_shared:
            contention, goes_on = self.steps.contention, self._goes_on(plan)
            end_s = self._machine.launch(self.key, self.pool, start_s, step_s, contention, goes_on)
        self._device_free_s = end_s
        request_ids = [part.request_id for part in plan.slices if part.num_sampled]
        if shape.num_prompt_tokens:
            self._prompt_clock.count(plan, end_s - start_s)
        self.counts.num_steps += 1
        self.counts.num_rows += shape.num_rows
        self.counts.num_prompt_tokens += shape.num_prompt_tokens
        return StepInFlight(plan.step_id, tuple(request_ids), end_s)

    def _swap_s(self, plan: StepPlan) -> float:
        num_swaps = len(plan.swap_outs) + len(plan.swap_ins)
        return self.costs.swap_s(num_swaps * self._block_tokens) if num_swaps else 0.0

    def _commit(self, step: StepInFlight, now_s: float) -> None:
        output = self._output(step)
        started = time.thread_time()
        self._take(output, now_s)
        self.counts.decision_s += time.thread_time() - started

    def load(self) -> EngineLoad:
        """As replicas.engine.engine reports it, but for the step time: to the policies it only settles ties."""
        scheduler = self.scheduler
        return EngineLoad(
            num_running=scheduler.num_running,
            num_queued=scheduler.num_queued,
            queued_prompt_tokens=scheduler.queued_prompt_tokens,
            free_blocks=scheduler.free_blocks(),
            total_blocks=scheduler.budget.num_blocks,
            step_s=0.0,
            prefill_tokens_per_s=self._prompt_clock.prefill_tokens_per_s,
            later_free_blocks=scheduler.later_free_blocks(),
            expected_tokens=scheduler.expected_tokens or 0,
        )

    @property
    def num_used_blocks(self) -> int:
        return self.scheduler.allocator.num_blocks - self.scheduler.allocator.num_free

    def settle(self, now_s: float) -> None:  # noqa: B027
        """Bring the state up to the end of the iteration that is under way. Mutates nothing that can be seen."""

    # -- what differs between the pools ------------------------------------------------------------

    @abstractmethod
    def _on_turn(self, turn: Turn) -> None:
        """Who was admitted, who was evicted."""

    @abstractmethod
    def _goes_on(self, plan: StepPlan) -> bool:
        """Whether another step follows this one, as far as can be told when it is launched."""

    @abstractmethod
    def _output(self, step: StepInFlight) -> StepOutput:
        """The tokens that it samples."""

    @abstractmethod
    def _take(self, output: StepOutput, now_s: float) -> None:
        """Commit a step's tokens and pass on what follows."""

    @abstractmethod
    def _flush(self, now_s: float) -> None:
        """Send what this iteration produced."""
