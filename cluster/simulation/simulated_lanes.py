"""A simulated engine with two lanes, as replicas.engine.two_lane_engine: prompts beside rows, both slower for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.simulation.cost_model import CostModel
from cluster.simulation.draft_shape import DraftShape
from cluster.simulation.engine_outlet import EngineOutlet
from cluster.simulation.event_queue import EventQueue
from cluster.simulation.shared_machine import SharedMachine, slowed_s
from cluster.simulation.simulated_device import SimulatedDevice, StepInFlight
from cluster.simulation.simulated_engine import SimulatedEngine
from cluster.simulation.step_model import StepModel
from replicas.metrics.lane_clock import LaneClock
from scheduler.lane_split import ALONE, LaneObjectives, LaneShare, ShareChooser
from scheduler.plan import StepPlan
from scheduler.scheduler import Scheduler
from scheduler.step_shape import StepShape
from scheduler.two_lane_core import TwoLaneCore


class DividedDevice(SimulatedDevice):
    """Steps of each lane one after another. A step of prompts takes as long as its share says, whatever runs beside it;
    a step of rows is slowed down for as long as prompts run that were launched before it.
    """

    def __init__(
        self,
        pool: str,
        key: int,
        steps: StepModel,
        costs: CostModel,
        machine: SharedMachine,
        block_size: int,
        drafts: DraftShape | None = None,
    ) -> None:
        super().__init__(pool, key, steps, costs, machine, block_size, drafts)
        self.clock = LaneClock()
        self._prompts_free_s = self._busy_until_s = 0.0
        self._share = ALONE  # of the prompts launched last

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.clock.prefill_tokens_per_s

    def rows_step_s(self, now_s: float) -> float:
        """How long a step of rows takes now, as an engine would have it."""
        share = self._share if self._prompts_free_s > now_s else ALONE
        return self.clock.rates.decode_step_s / share.decode_rate

    def launch_prompts(self, plan: StepPlan, share: LaneShare, now_s: float) -> StepInFlight:
        """Behind the prompts before. Mutates."""
        shape = StepShape.of(plan)
        start_s = max(now_s, self._prompts_free_s)
        self._prompts_free_s = start_s + self.steps.step_s(*shape) / share.prefill_rate
        self._share = share
        return self._counted(start_s, self._prompts_free_s, plan, shape, share)

    def launch_rows(self, plan: StepPlan, now_s: float) -> StepInFlight:
        """Behind the rows before. Mutates."""
        shape = StepShape.of(plan)
        start_s = max(now_s, self.free_s)
        alone_s = self._step_s(plan, shape)
        beside_s = max(0.0, self._prompts_free_s - start_s)
        self.free_s = start_s + slowed_s(alone_s, 1.0 / self._share.decode_rate, beside_s)
        return self._counted(start_s, self.free_s, plan, shape, self._share if beside_s else ALONE)

    def _counted(
        self, start_s: float, end_s: float, plan: StepPlan, shape: StepShape, share: LaneShare
    ) -> StepInFlight:
        self.clock.count_lane(plan, end_s - start_s, share)
        self.counts.busy_s += max(0.0, end_s - max(start_s, self._busy_until_s))
        self._busy_until_s = max(self._busy_until_s, end_s)
        return self._until(end_s, plan, shape, end_s - start_s)


@dataclass(frozen=True, slots=True)
class LaneDivision:
    """How a card is divided. shares: of it; none: both lanes have all of it."""

    objectives: LaneObjectives
    shares: Sequence[LaneShare]
    chooser: ShareChooser


class SimulatedTwoLanes(SimulatedEngine):
    """As SimulatedEngine, but it commits whichever lane's step ends first."""

    core: TwoLaneCore[StepInFlight]

    def __init__(
        self,
        replica_id: str,
        key: int,
        scheduler: Scheduler,
        device: DividedDevice,
        costs: CostModel,
        queue: EventQueue,
        outlet: EngineOutlet,
        division: LaneDivision,
    ) -> None:
        core: TwoLaneCore[StepInFlight] = TwoLaneCore(scheduler)
        super().__init__(replica_id, key, scheduler, device, costs, queue, outlet, may_skip=False, core=core)
        self._divided, self._division = device, division

    def _iterate(self, begin_s: float) -> None:
        now_s, device, core = begin_s, self._divided, self.core
        inbox, self._inbox = self._inbox, []
        for action in inbox:
            action(now_s)
        for step in sorted([*core.in_flight, *core.prompts_in_flight], key=lambda step: step.end_s):
            if step.end_s <= now_s:
                lane = core.lane_of(step, step.end_s)
                assert lane is not None, "a step ended before the one in front of it"
                self.calls.ran(step, self.calls.output_of(step), now_s, lane)
        turn = core.turn(now_s, rows_step_s=device.rows_step_s(now_s))
        self.counts.num_decisions += 1
        self.calls.turned(turn)
        if turn.prompts is not None:
            load = core.prompt_load(turn.prompts, now_s, device.clock.rates)
            share = self._division.chooser(load, self._division.objectives, self._division.shares)
            core.prefill_launched(device.launch_prompts(turn.prompts, share, now_s))
        if turn.plan is not None:
            core.launched(device.launch_rows(turn.plan, now_s))
        self.calls.flush(now_s)
        self._rest(now_s, core.may_plan_more(turn))

    def _rest(self, now_s: float, may_plan_more: bool) -> None:
        """Until a step ends, somebody's time is up, or a message comes. may_plan_more: not at all."""
        self._is_asleep = True
        if may_plan_more:
            self._wake_at(now_s)
            return
        wakes_s = [steps[0].end_s for steps in (self.core.in_flight, self.core.prompts_in_flight) if steps]
        if (deadline_s := self.scheduler.next_deadline_s) is not None:
            wakes_s.append(deadline_s)
        if self.core.rows_held_until_s is not None:
            wakes_s.append(self.core.rows_held_until_s)
        if wakes_s:
            self._wake_at(max(now_s, min(wakes_s)))
