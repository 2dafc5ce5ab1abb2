"""The loop of an engine with two lanes: prompts in one line of steps, rows in another, over one ledger.

    turn -> its driver launches the plans -> launched, prefill_launched -> a step has run -> lane_of -> commit

Steps of one lane end one behind the other; between lanes nothing is ordered, so whoever is ready is committed.
"""

from __future__ import annotations

from collections import deque

from scheduler.engine_core import EngineCore, StepT, Turn
from scheduler.lane import Lane
from scheduler.lane_split import LaneLoad, LaneRates
from scheduler.plan import StepPlan
from scheduler.scheduler import Scheduler


class TwoLaneCore(EngineCore[StepT]):
    """As EngineCore, whose in_flight is the decode lane's here. The scheduler must have two lanes.

    A lane plans while no more steps than its lag are in flight in it: neither waits for the other.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        assert scheduler.has_two_lanes
        self.prompts_in_flight: deque[StepT] = deque()
        self._num_rows = 0  # that ran or were about to when the last turn began

    def turn(self, now_s: float, *, may_admit: bool = True, may_plan: bool = True) -> Turn:
        self._num_rows = len(self.scheduler.batch) + self.scheduler.num_changing_lanes
        turn = super().turn(now_s, may_admit=may_admit, may_plan=may_plan and self._has_room(self.in_flight))
        if not may_plan or not self._has_room(self.prompts_in_flight):
            return turn
        return turn._replace(prompts=self._plan_prompts(now_s))

    def prompt_load(self, prompts: StepPlan, now_s: float, rates: LaneRates) -> LaneLoad:
        """What the share of the turn's prompts depends on."""
        num_tokens = self.scheduler.queued_prompt_tokens + prompts.num_prefill_tokens
        return LaneLoad(num_tokens, self.scheduler.oldest_prompt_s(now_s), self._num_rows, rates)

    def prefill_launched(self, step: StepT) -> None:
        """The turn's prompts are on their way. Mutates."""
        self.prompts_in_flight.append(step)

    def lane_of(self, step: StepT) -> Lane | None:
        """Whose step has run, if it is the oldest in flight there: it is to be committed now, and in flight no more.
        None: it was abandoned. Mutates.
        """
        for steps, lane in (
            (self.in_flight, self.scheduler.decode_lane),
            (self.prompts_in_flight, self.scheduler.prefill_lane),
        ):
            if steps and steps[0] is step:
                steps.popleft()
                return lane
        return None

    def abandon(self) -> None:
        self.prompts_in_flight.clear()
        super().abandon()

    def _has_room(self, steps: deque[StepT]) -> bool:
        return len(steps) <= self.scheduler.lag

    def _plan(self, now_s: float) -> StepPlan | None:
        return self.scheduler.plan_decode(now_s)

    def _plan_prompts(self, now_s: float) -> StepPlan | None:
        return self.scheduler.plan_prefill(now_s)
