"""Counts the steps of an engine with two lanes, and what both would take with the card for themselves."""

from __future__ import annotations

from collections import Counter

from replicas.metrics.engine_status import SMOOTHING, StepClock
from replicas.metrics.pool_metrics import LANES
from scheduler.lane_split import LaneRates, LaneShare
from scheduler.plan import StepPlan


class LaneClock(StepClock):
    """As StepClock, whose mean_s is that of the decode lane's steps: the gaps between tokens. Engine thread only.

    num_lane_steps, lane_busy_s: by lane. num_steps_by_processors: of the prefill lane, by how many multiprocessors it
    had (0: the whole card); num_processors: in its last step.
    rates: moving averages, as they would be on the whole card with nothing beside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_lane_steps = dict.fromkeys(LANES, 0)
        self.lane_busy_s = dict.fromkeys(LANES, 0.0)
        self.num_processors = 0
        self.num_steps_by_processors: Counter[int] = Counter()
        self.rates = LaneRates()

    def count_lane(self, plan: StepPlan, duration_s: float, share: LaneShare, *, is_alike: bool = True) -> None:
        """Take a step that has run into account. share: of the prompts in it, or beside it. is_alike: from its begin to
        its end; else it tells nothing of rates."""
        if plan.is_empty:
            return
        lane = "prefill" if plan.chunks else "decode"
        mean_s = self.mean_s
        self.count(plan, duration_s)
        self.num_lane_steps[lane] += 1
        self.lane_busy_s[lane] += duration_s
        if lane == "prefill":
            self.mean_s = mean_s
            self.num_processors = share.num_processors or 0
            self.num_steps_by_processors[self.num_processors] += 1
            if duration_s > 0.0:
                rate = plan.num_prefill_tokens / (duration_s * share.prefill_rate)
                known = self.rates.prefill_tokens_per_s
                self.rates = LaneRates(known + (rate - known) * self._weight(lane), self.rates.decode_step_s)
            return
        self.mean_s = mean_s + (duration_s - mean_s) * self._weight(lane)
        if not is_alike:
            return
        known = self.rates.decode_step_s
        step_s = known + (duration_s * share.decode_rate - known) * (SMOOTHING if known else 1.0)
        self.rates = LaneRates(self.rates.prefill_tokens_per_s, step_s)

    def _weight(self, lane: str) -> float:
        return SMOOTHING if self.num_lane_steps[lane] > 1 else 1.0
