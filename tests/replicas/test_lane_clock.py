"""What two lanes' steps say of either one alone, by hand."""

from __future__ import annotations

import pytest

from replicas.metrics.lane_clock import LaneClock
from scheduler.lane_split import ALONE, WHOLE_CARD, LaneShare
from scheduler.plan import Slice, StepPlan

HALF = LaneShare(66, 0.5, 0.25)
ROWS = StepPlan(0, (), (), (), (Slice("r", 0, 0, 5), Slice("r", 1, 1, 5)))
PROMPT = StepPlan(0, (), (), (), (Slice.of_prompt("p", 2, 0, tuple(range(100))),))


def test_rates_are_those_of_the_whole_card() -> None:
    clock = LaneClock()
    clock.count_lane(PROMPT, 0.2, HALF)
    assert clock.rates.prefill_tokens_per_s == pytest.approx(1000)
    clock.count_lane(ROWS, 0.02, HALF)
    assert clock.rates.decode_step_s == pytest.approx(0.005)
    clock.count_lane(ROWS, 0.005, ALONE)
    clock.count_lane(PROMPT, 0.1, WHOLE_CARD)
    assert clock.rates.decode_step_s == pytest.approx(0.005)
    assert clock.rates.prefill_tokens_per_s == pytest.approx(1000)


def test_a_step_beside_which_prompts_came_or_went_tells_nothing_of_rates() -> None:
    clock = LaneClock()
    clock.count_lane(ROWS, 0.02, HALF, is_alike=False)
    assert clock.rates.decode_step_s == 0.0
    clock.count_lane(ROWS, 0.02, HALF)
    assert clock.rates.decode_step_s == pytest.approx(0.005), "the first that tells counts whole"
    assert clock.num_lane_steps == {"prefill": 0, "decode": 2}


def test_the_mean_is_that_of_gaps_between_tokens() -> None:
    """Routers and the autoscaler take it for that."""
    clock = LaneClock()
    clock.count_lane(ROWS, 0.02, ALONE)
    clock.count_lane(PROMPT, 5.0, HALF)
    assert clock.mean_s == pytest.approx(0.02)
    assert clock.prefill_tokens_per_s == pytest.approx(20)
    assert (clock.num_rows, clock.num_prefilled_tokens, clock.num_steps) == (2, 100, 2)
    assert clock.lane_busy_s == {"prefill": 5.0, "decode": 0.02}
    assert clock.num_processors == 66
