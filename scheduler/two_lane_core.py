"""The loop of an engine with two lanes: prompts in one line of steps, rows in another, over one ledger.

    turn -> its driver launches the plans -> launched, prefill_launched -> a step has run -> lane_of -> commit

Steps of one lane end one behind the other; between lanes nothing is ordered, so whoever is ready is committed.

A step of rows that is planned ahead leaves out who becomes a row a moment later: that request then waits for the rest
of the step that runs, for the one behind it, and for its own. So while the step that makes somebody a row is in flight,
rows are planned ahead no sooner than launching them takes. Its first row is then in the step behind the one that runs.
"""

from __future__ import annotations

from collections import deque

from scheduler.engine_core import EngineCore, StepT, Turn
from scheduler.lane import Lane
from scheduler.lane_split import LaneLoad, LaneRates
from scheduler.plan import StepPlan
from scheduler.scheduler import Scheduler

# From planning a step until the device has it, where nobody knows better: an H200's host takes 1.5 ms.
_LEAD_S = 0.003


class TwoLaneCore(EngineCore[StepT]):
    """As EngineCore, whose in_flight is the decode lane's here. The scheduler must have two lanes.

    A lane plans while no more steps than its lag are in flight in it: neither waits for the other.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        assert scheduler.has_two_lanes
        self.prompts_in_flight: deque[StepT] = deque()
        self.rows_held_until_s: float | None = None  # by the last turn: the driver is to come back then
        self._num_rows = 0  # that ran or were about to when the last turn began
        self._turn_s = 0.0
        self._rows_began_s = 0.0  # the oldest step of the decode lane in flight

    def turn(
        self,
        now_s: float,
        *,
        may_admit: bool = True,
        may_plan: bool = True,
        rows_step_s: float = 0.0,
        lead_s: float = _LEAD_S,
    ) -> Turn:
        """rows_step_s: how long a step of rows takes now, as far as that is known. lead_s: how long before its end the
        next one has to be planned."""
        self._turn_s = now_s
        self._num_rows = len(self.scheduler.batch) + self.scheduler.num_changing_lanes
        self.rows_held_until_s = self._rows_held_until_s(now_s, rows_step_s, lead_s)
        may_plan_rows = may_plan and self.rows_held_until_s is None and self._has_room(self.in_flight)
        turn = super().turn(now_s, may_admit=may_admit, may_plan=may_plan_rows)
        if not may_plan or not self._has_room(self.prompts_in_flight):
            return turn
        return turn._replace(prompts=self._plan_prompts(now_s))

    def may_plan_more(self, turn: Turn) -> bool:
        """Whether a lane that this turn gave a step has room for another. Then the next turn is due at once: else the
        lane would run out of work at that step's end."""
        rows = turn.plan is not None and self._has_room(self.in_flight)
        return rows or (turn.prompts is not None and self._has_room(self.prompts_in_flight))

    def prompt_load(self, prompts: StepPlan, now_s: float, rates: LaneRates) -> LaneLoad:
        """What the share of the turn's prompts depends on."""
        num_tokens = self.scheduler.queued_prompt_tokens + prompts.num_prefill_tokens
        return LaneLoad(num_tokens, self.scheduler.oldest_prompt_s(now_s), self._num_rows, rates)

    def launched(self, step: StepT) -> None:
        if not self.in_flight:
            self._rows_began_s = self._turn_s
        super().launched(step)

    def prefill_launched(self, step: StepT) -> None:
        """The turn's prompts are on their way. Mutates."""
        self.prompts_in_flight.append(step)

    def lane_of(self, step: StepT, ended_s: float) -> Lane | None:
        """Whose step has run, if it is the oldest in flight there: it is to be committed now, and in flight no more.
        None: it was abandoned. Mutates.
        """
        if self.in_flight and self.in_flight[0] is step:
            self.in_flight.popleft()
            self._rows_began_s = ended_s
            return self.scheduler.decode_lane
        if self.prompts_in_flight and self.prompts_in_flight[0] is step:
            self.prompts_in_flight.popleft()
            return self.scheduler.prefill_lane
        return None

    def abandon(self) -> None:
        self.prompts_in_flight.clear()
        super().abandon()

    def _rows_held_until_s(self, now_s: float, rows_step_s: float, lead_s: float) -> float | None:
        """None: the next step of rows may be planned now."""
        if not self.in_flight or not self.scheduler.num_changing_lanes:
            return None
        latest_s = self._rows_began_s + rows_step_s * len(self.in_flight) - lead_s
        return latest_s if latest_s > now_s else None

    def _has_room(self, steps: deque[StepT]) -> bool:
        return len(steps) <= self.scheduler.lag

    def _plan(self, now_s: float) -> StepPlan | None:
        return self.scheduler.plan_decode(now_s)

    def _plan_prompts(self, now_s: float) -> StepPlan | None:
        return self.scheduler.plan_prefill(now_s)
