"""A step on a GPU takes from its launch, or the end of the one before it, until its tokens are back."""

from __future__ import annotations

import pytest

from replicas.engine.step_timer import StepTimer
from scheduler.plan import StepPlan


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, (), (), (), ())


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


def test_a_step_that_ended_at_launch_took_what_the_launch_took() -> None:
    timer = StepTimer()
    timer.ran(plan(1), 0.25)
    timer.ran(plan(2), 0.5)
    assert timer.committed(1, 100.0) == (plan(1), 0.25)
    timer.abandon()
    assert timer.committed(2, 101.0) is None


def test_steps_that_were_abandoned_are_none_of_its_business() -> None:
    timer = StepTimer()
    assert timer.committed(1, 5.0) is None
    timer.launched(plan(2), 6.0)  # abandoned
    timer.launched(plan(3), 7.0)
    timed = timer.committed(3, 9.0)
    assert timed is not None
    assert (timed[0].step_id, timed[1]) == (3, pytest.approx(2.0))
    assert timer.committed(2, 9.5) is None
