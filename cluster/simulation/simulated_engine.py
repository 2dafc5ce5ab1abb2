"""An engine's loop (scheduler.engine_core) on the simulated clock, driven by messages as replicas.engine.engine is.

What it can do its scheduler says: compute prompts, decode, offer KV, read KV.

An iteration is computed when it begins; what it brings about happens at the times when its steps end. Messages that
come meanwhile wait for the next one, as they wait in a real engine's inbox.
"""

from __future__ import annotations

import time
from functools import partial

from cluster.simulation.client import Attempt
from cluster.simulation.cost_model import CostModel
from cluster.simulation.engine_outlet import EngineOutlet
from cluster.simulation.event_queue import Action, EventQueue, Order
from cluster.simulation.simulated_calls import SimulatedCalls
from cluster.simulation.simulated_device import SimulatedDevice, StepInFlight
from cluster.simulation.simulated_handoffs import SimulatedHandoffs
from cluster.simulation.steady_stretch import SteadyStretches
from replicas.messages import EngineLoad
from replicas.metrics.engine_status import load_of
from scheduler.engine_core import EngineCore
from scheduler.recent_keys import RecentKeys
from scheduler.scheduler import Scheduler


class SimulatedEngine:
    """One replica. key: its number among all replicas, which settles what comes first at the same instant."""

    def __init__(
        self,
        replica_id: str,
        key: int,
        scheduler: Scheduler,
        device: SimulatedDevice,
        costs: CostModel,
        queue: EventQueue,
        outlet: EngineOutlet,
        *,
        may_skip: bool = True,
        core: EngineCore[StepInFlight] | None = None,
    ) -> None:
        """may_skip: take steady steps many at once; the results are the same, only sooner. core: None: one lane."""
        self.recent_keys: RecentKeys | None = None  # of its prefix cache; None: it has none
        self.replica_id, self.key, self.scheduler = replica_id, key, scheduler
        self.core: EngineCore[StepInFlight] = core or EngineCore(scheduler)
        self.counts = device.counts
        self._device, self._queue = device, queue
        self._may_skip = may_skip and scheduler.capabilities.decodes and scheduler.drafts is None
        self.calls = SimulatedCalls(replica_id, self.core, device, outlet, self.load)
        self._handoffs = SimulatedHandoffs(key, scheduler, device, costs, queue, outlet, self._post)
        self._stretches = SteadyStretches(self.core, device, self.calls)
        self._inbox: list[Action] = []
        self._wake_number = 0
        self._is_asleep = True

    # -- messages: each arrives now_s, and is taken when the next iteration begins -----------------

    def generate(self, attempt: Attempt, deadline_s: float, now_s: float) -> None:
        """A request to decode, its prompt computed here if its route says so."""
        request = attempt.request(deadline_s, local_prefill=attempt.is_local)
        self._post(partial(self.calls.submit, attempt, request), now_s)

    def prefill(self, attempt: Attempt, deadline_s: float, now_s: float) -> None:
        """A prompt to compute whose KV is handed over."""
        request = attempt.request(deadline_s, local_prefill=True, hands_over=True)
        self._post(partial(self.calls.submit, attempt, request), now_s)

    def cancel(self, request_id: str, now_s: float) -> None:
        """The router has gone."""
        self._post(partial(self.calls.cancel, request_id), now_s)
        self._post(partial(self._handoffs.cancelled, request_id), now_s)

    def handoff(self, attempt: Attempt, num_blocks: int | None, now_s: float) -> None:
        """The source has so many blocks more of a prompt's KV, or all that is left of it: None."""
        self._handoffs.part_arrived(attempt, num_blocks, now_s)

    def lease_ended(self, request_id: str, now_s: float) -> None:
        """The reader is done with the blocks, or does not want them."""
        self._post(partial(self.calls.lease_ended, request_id), now_s)

    def _post(self, action: Action, now_s: float) -> None:
        next_s = self._stretches.interrupt(now_s)
        if next_s is not None:
            self._wake_at(next_s)
        self._inbox.append(action)
        if self._is_asleep:
            self._wake_at(now_s)

    def _wake_at(self, time_s: float) -> None:
        """Replaces any other wake-up."""
        self._wake_number += 1
        number = self._wake_number
        self._queue.at(time_s, Order.WAKE, self.key, lambda now_s: self._wake(now_s, number))

    def _wake(self, now_s: float, number: int) -> None:
        if number == self._wake_number:
            self._is_asleep = False
            self._iterate(now_s)

    # -- the loop ----------------------------------------------------------------------------------

    def _iterate(self, begin_s: float) -> None:
        self._stretches.finish()
        now_s = begin_s
        inbox, self._inbox = self._inbox, []
        for action in inbox:
            action(now_s)
        started = time.thread_time()
        turn = self.core.turn(now_s)
        self.counts.decision_s += time.thread_time() - started
        self.counts.num_decisions += 1
        self.calls.turned(turn)
        if turn.plan is not None:
            self.core.launched(self._device.launch(turn.plan, now_s, self._goes_on))
        has_committed = bool(self.core.in_flight)
        for step in self.core.due(turn):
            now_s = max(now_s, step.end_s)
            self._commit(step, now_s)
        self.calls.flush(now_s)
        if turn.plan is None and not has_committed:
            self._sleep(now_s)
        else:
            next_s = now_s + self._device.steps.overhead_s
            self.counts.busy_s += next_s - begin_s
            self._go_on(next_s)

    def _commit(self, step: StepInFlight, now_s: float) -> None:
        output = self.calls.output_of(step)
        started = time.thread_time()
        self.calls.ran(step, output, now_s)
        self.counts.decision_s += time.thread_time() - started

    @property
    def _goes_on(self) -> bool:
        """Whether another step follows the one that was just planned: that all rows end with one step is rare."""
        return self.scheduler.capabilities.decodes or self.scheduler.queued_prompt_tokens > 0

    def _go_on(self, next_s: float) -> None:
        """The next iteration begins at next_s, or steady ones do."""
        if self._may_skip and not self._inbox:
            next_s = self._stretches.begin(next_s)
        self._wake_at(next_s)

    def _sleep(self, now_s: float) -> None:
        self._is_asleep = True
        deadline_s = self.scheduler.next_deadline_s
        if deadline_s is not None:
            self._wake_at(max(now_s, deadline_s))

    # -- what others see of it ---------------------------------------------------------------------

    def load(self) -> EngineLoad:
        """As an engine reports it, but for the step time, which is that of one sequence: to the policies it settles
        ties, and says how long a request stays."""
        device = self._device
        mixture = device.mixture.at(self._queue.now_s)
        return load_of(self.scheduler, device.steps.step_s(1, 0), device.prefill_tokens_per_s, mixture=mixture)

    @property
    def num_used_blocks(self) -> int:
        return self.scheduler.allocator.num_blocks - self.scheduler.allocator.num_free

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open here: no request, lease or block held."""
        return not (self.scheduler.num_queued or self.scheduler.num_running or self.num_used_blocks)

    def settle(self, now_s: float) -> None:
        """Bring the state up to the end of the iteration that is under way. Mutates nothing that can be seen."""
        self._stretches.settle(now_s)
