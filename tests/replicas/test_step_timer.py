"""A step on a GPU takes from its launch, or the end of the one before it, until its tokens are back."""

from __future__ import annotations

import pytest

from replicas.engine.step_timer import StepTimer
from scheduler.plan import PrefillChunk, StepPlan


def plan(step_id: int, num_prompt_tokens: int = 0) -> StepPlan:
    chunks = (PrefillChunk("prompt", 0, 0, (1,) * num_prompt_tokens, ()),) if num_prompt_tokens else ()
    return StepPlan(step_id, (), (), (), chunks, ())


def test_overlapping_steps_are_not_counted_twice() -> None:
    timer = StepTimer()
    timer.launched(plan(1), 10.0)
    timer.launched(plan(2), 10.5)
    for step_id, end_s, duration_s in ((1, 12.0, 2.0), (2, 13.5, 1.5)):
        timed = timer.committed(step_id, end_s)
        assert timed is not None
        assert timed[0].step_id == step_id
        assert timed[1] == pytest.approx(duration_s)
    timer.launched(plan(3), 20.0)
    timed = timer.committed(3, 21.0)
    assert timed is not None
    assert timed[1] == pytest.approx(1.0)


def test_steps_that_ended_at_launch_or_were_abandoned_are_none_of_its_business() -> None:
    timer = StepTimer()
    assert timer.committed(1, 5.0) is None
    timer.launched(plan(2), 6.0)  # abandoned
    timer.launched(plan(3), 7.0)
    timed = timer.committed(3, 9.0)
    assert timed is not None
    assert (timed[0].step_id, timed[1]) == (3, pytest.approx(2.0))
    assert timer.committed(2, 9.5) is None


def test_the_next_step_is_planned_just_before_what_is_in_flight_ends() -> None:
    timer = StepTimer()
    assert timer.latest_launch_s() == 0.0  # nothing is in flight
    timer.launched(plan(1), 10.0)
    assert timer.latest_launch_s() == 0.0  # nobody knows how long such a step takes
    timer.committed(1, 10.020)
    for step_id, start_s in ((2, 11.0), (3, 12.0)):
        timer.launched(plan(step_id), start_s)
        timer.committed(step_id, start_s + 0.010 * step_id)
    timer.prepared(plan(3), 0.002)
    timer.prepared(plan(3, 1000), 0.050)  # prompts do not count
    timer.launched(plan(4), 20.0)
    assert 20.016 < timer.latest_launch_s() < 20.018  # the fastest of late took 20 ms, the host needs 2
    timer.launched(plan(5), 20.001)
    assert 20.036 < timer.latest_launch_s() < 20.038
    timer.committed(4, 20.025)
    assert 20.041 < timer.latest_launch_s() < 20.043
    timer.committed(5, 20.045)
    assert timer.latest_launch_s() == 0.0


def test_a_step_with_prompts_is_expected_to_take_a_little_less_than_its_tokens_did() -> None:
    timer = StepTimer()
    timer.launched(plan(1, 1000), 10.0)
    assert timer.latest_launch_s() == 0.0
    timer.committed(1, 10.100)
    timer.launched(plan(2, 500), 20.0)
    assert 20.035 < timer.latest_launch_s() < 20.050


def test_a_slow_host_is_remembered_for_a_while() -> None:
    timer = StepTimer()
    timer.launched(plan(1), 1.0)
    timer.committed(1, 1.1)
    timer.prepared(plan(1), 0.040)
    timer.launched(plan(2), 2.0)
    soon_s = timer.latest_launch_s()
    assert soon_s < 2.061
    for _ in range(300):
        timer.prepared(plan(2), 0.001)
    assert soon_s + 0.035 < timer.latest_launch_s() < 2.1
