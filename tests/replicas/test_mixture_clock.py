"""What rows wait for prompts, as an engine counts it."""

from __future__ import annotations

import math

import pytest

from replicas.messages import PROMPT_SHARE_S
from replicas.metrics.mixture_clock import MixtureClock
from scheduler.plan import Slice, StepPlan


def plan_of(num_rows: int, num_prompts: int) -> StepPlan:
    rows = tuple(Slice(f"r{n}", 0, n, 10, 1, 1) for n in range(num_rows))
    chunks = tuple(Slice.of_prompt(f"p{n}", n, 0, (1, 2, 3)) for n in range(num_prompts))
    return StepPlan(0, (), (), (), rows + chunks)


def test_steps_of_rows_alone_have_their_mean_and_take_nothing_from_prompts() -> None:
    clock = MixtureClock()
    assert (clock.row_step_s, clock.prompt_share(0.0)) == (0.0, 0.0)
    for number in range(50):
        clock.count(plan_of(4, 0), 0.005, 0.005 * number)
    assert clock.row_step_s == pytest.approx(0.005)
    assert clock.prompt_share(1.0) == 0.0


def test_of_a_mixed_step_prompts_have_what_it_took_more() -> None:
    """Half of the time is the prompts', so half of it is their share, however short the steps are."""
    for step_s in (0.01, 0.1):
        clock = MixtureClock()
        clock.count(plan_of(4, 0), step_s, 0.0)
        now_s = 0.0
        while now_s < 10 * PROMPT_SHARE_S:
            now_s += 2 * step_s
            clock.count(plan_of(4, 1), 2 * step_s, now_s)
        assert clock.prompt_share(now_s) == pytest.approx(0.5, abs=0.05)
        assert clock.row_step_s == step_s, "which only steps of rows alone tell"


def test_a_share_passes() -> None:
    clock = MixtureClock()
    clock.count(plan_of(0, 1), 10 * PROMPT_SHARE_S, 100.0)
    assert clock.prompt_share(100.0) == pytest.approx(1.0, abs=0.02)
    assert clock.prompt_share(100.0 + PROMPT_SHARE_S) == pytest.approx(math.exp(-1.0), abs=0.02)
    assert clock.prompt_share(200.0) == 0.0
