"""How fast prompts are computed, as an engine counts it and routers are told."""

from __future__ import annotations

import pytest

from replicas.metrics.engine_status import StepClock
from scheduler.plan import Slice, StepPlan


def prompt_of(num_tokens: int) -> StepPlan:
    return StepPlan(0, (), (), (), (Slice.of_prompt("p", 0, 0, tuple(range(num_tokens))),))


def clock_after(num_steps: int, num_tokens: int, step_s: float) -> StepClock:
    clock = StepClock()
    for _ in range(num_steps):
        clock.count(prompt_of(num_tokens), step_s)
    return clock


@pytest.mark.parametrize("num_stalls", [1, 2])
def test_a_machine_that_stood_still_is_no_slow_one(num_stalls: int) -> None:
    """Seen on two cores: a thread that gets none for 5 to 8 s. Of 100 tokens in 20 ms that would make 200 a second."""
    clock = clock_after(20, 100, 0.02)
    for _ in range(num_stalls):
        clock.count(prompt_of(100), 5.0)
    assert clock.prefill_tokens_per_s > 5000 / 2
    assert clock.busy_s == pytest.approx(20 * 0.02 + num_stalls * 5.0), "only the rate leaves it out"
    for _ in range(20):
        clock.count(prompt_of(100), 0.02)
    assert clock.prefill_tokens_per_s == pytest.approx(5000, rel=0.1)


@pytest.mark.parametrize("times", [0.1, 5.0, 100.0])
def test_what_has_become_slower_or_faster_is_known_soon(times: float) -> None:
    clock = clock_after(20, 100, 0.02)
    for _ in range(60):
        clock.count(prompt_of(100), 0.02 * times)
    assert clock.prefill_tokens_per_s == pytest.approx(5000 / times, rel=0.05)


def test_short_ends_of_long_prompts_count_as_long_as_they_take() -> None:
    """Three tokens take as long as weights are read: far longer than by the rate of 2,048."""
    clock = StepClock()
    for _ in range(30):
        clock.count(prompt_of(2048), 0.4)
        clock.count(prompt_of(3), 0.1)
    assert clock.prefill_tokens_per_s == pytest.approx(2051 / 0.5, rel=0.06)
