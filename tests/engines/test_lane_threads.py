"""A lane launches while it waits: a device that computes behind the host's back is given its next step in time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from replicas.engine.lane_threads import LaneStep, LaneThreads
from replicas.model.model_runner import StepHandle
from replicas.sampling.sampled_tokens import SampledTokens
from scheduler.lane_split import ALONE
from scheduler.plan import Slice, StepPlan

PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class HeldChoice(SampledTokens):
    """Tokens that are there when `ended` is set."""

    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def is_on_the_way(self) -> bool:
        return True

    def read_tokens(self) -> list[int]:
        assert self.ended.wait(PATIENCE_S)
        return SampledTokens.read_tokens(self)


class Device:
    """Steps end when the test says so. launched: each step's id, once it is on its way."""

    def __init__(self) -> None:
        self.launched: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.ends: dict[int, threading.Event] = {}
        self.failing: set[int] = set()

    def launch(self, plan: StepPlan) -> StepHandle:
        if plan.step_id in self.failing:
            raise LookupError("a bug of ours")
        self.ends[plan.step_id] = threading.Event()
        self.launched.put(plan.step_id)
        return StepHandle(plan, HeldChoice(torch.full((1,), 5), ended=self.ends[plan.step_id]))


class Driven:
    def __init__(self) -> None:
        self.device: Any = Device()
        self.done: queue.SimpleQueue[LaneStep] = queue.SimpleQueue()
        self.lane = LaneThreads("lane", 1, self.done.put)
        self.lane.start(lambda: None)

    def submit(self, step_id: int) -> None:
        self.lane.submit(StepPlan(step_id, (), (), (), (Slice("row", 0, 0, step_id),)), self.device, ALONE)

    def wait_for_launch(self) -> int:
        launched: int = self.device.launched.get(timeout=PATIENCE_S)
        return launched


@pytest.fixture
def driven() -> Iterator[Driven]:
    driven = Driven()
    yield driven
    for end in driven.device.ends.values():
        end.set()
    driven.lane.finish()
    driven.lane.stop(PATIENCE_S)
    assert not driven.lane.is_alive


def test_a_step_is_launched_while_the_one_before_it_runs(driven: Driven) -> None:
    """Three in flight one after another, each planned when the one two before it has ended."""
    driven.submit(0)
    driven.submit(1)
    assert [driven.wait_for_launch(), driven.wait_for_launch()] == [0, 1]
    for step_id in range(2, 6):
        driven.device.ends[step_id - 2].set()
        assert driven.done.get(timeout=PATIENCE_S).plan.step_id == step_id - 2
        driven.submit(step_id)
        assert driven.wait_for_launch() == step_id, "it came when the step before it was waited for already"
        assert not driven.device.ends[step_id - 1].is_set()


def test_steps_end_in_their_order_and_do_not_overlap(driven: Driven) -> None:
    for step_id in range(3):
        driven.submit(step_id)
        driven.wait_for_launch()
    for step_id in (2, 1, 0):
        driven.device.ends[step_id].set()
    steps = [driven.done.get(timeout=PATIENCE_S) for _ in range(3)]
    assert [step.plan.step_id for step in steps] == [0, 1, 2]
    assert steps[0].ended_s <= steps[1].started_s <= steps[1].ended_s <= steps[2].started_s


def test_what_comes_behind_a_step_that_failed_is_not_run(driven: Driven) -> None:
    driven.device.failing = {0}
    driven.submit(0)
    assert driven.done.get(timeout=PATIENCE_S).failure is not None
    driven.submit(1)
    later = driven.done.get(timeout=PATIENCE_S)
    assert later.plan.step_id == 1
    assert later.failure is None
    assert later.output is not None
    assert later.output.tokens == ()
    driven.lane.finish()
    driven.submit(2)
    assert driven.wait_for_launch() == 2


def test_each_thread_stands_still_only_while_there_is_something_to_do(driven: Driven) -> None:
    beats = {name: watched.beat for name, watched in driven.lane.watched().items()}
    assert beats.keys() == {"lane", "lane-reader"}
    driven.submit(0)
    driven.wait_for_launch()
    deadline_s = time.monotonic() + PATIENCE_S
    while not driven.lane._num_launched:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert beats["lane-reader"]() == beats["lane-reader"](), "it waits for a step"
    assert beats["lane"]() != beats["lane"](), "it has nothing to launch"
    driven.device.ends[0].set()
    driven.done.get(timeout=PATIENCE_S)
    driven.lane.finish()
    assert beats["lane-reader"]() != beats["lane-reader"]()
