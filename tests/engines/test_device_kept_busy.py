"""An engine that plans one step ahead keeps the device busy, also where launching a step takes as long as computing it.

The model's part is played by a device that computes behind the host's back, in a fixed time a step. (Planning later, by
how long steps took before, was tried: with a queue the waits fed on themselves, until steps took five times as long.)
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.bare_engine import BareEngine, EngineSize, TimedTokens
from replicas.engine import engine as engine_module
from replicas.engine import two_lane_engine as two_lane_module
from replicas.messages import CallStatus, GenerateCall
from replicas.model.model_runner import StepHandle
from replicas.sampling.sampled_tokens import SampledTokens
from scheduler.generation_spec import GenerationSpec
from scheduler.lane_split import LaneObjectives
from scheduler.plan import StepPlan
from scheduler.sampling_params import SamplingParams
from tests.engines.tiny_model import save_tiny_model

ROWS_S, PROMPTS_S = 0.02, 0.1  # of the device, a step
LAUNCH_S = 0.09  # of the host, a step with prompts: the device begins meanwhile
PATIENCE_S = 120.0
MOST_OF_IT_BUSY = 0.6  # pauses for each second of work: the launches alone would be more than this
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class LateChoice(SampledTokens):
    """Tokens that are there at ready_s."""

    ready_s: float = 0.0

    @property
    def is_on_the_way(self) -> bool:
        return True

    def read_tokens(self) -> list[int]:
        time.sleep(max(0.0, self.ready_s - time.monotonic()))
        return SampledTokens.read_tokens(self)


class Device:
    """Runs steps one behind the other. spans: start and end of each that computes something."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def launch(self, plan: StepPlan) -> StepHandle:
        if plan.is_empty:
            return StepHandle(plan)
        start_s = max(time.monotonic(), self.spans[-1][1] if self.spans else 0.0)
        end_s = start_s + (PROMPTS_S if plan.chunks else ROWS_S)
        if plan.chunks:
            time.sleep(LAUNCH_S)
            end_s = max(end_s, time.monotonic())
        self.spans.append((start_s, end_s))
        num_tokens = sum(len(part.sampled_choices) for part in plan.slices)
        return StepHandle(plan, LateChoice(torch.full((num_tokens,), 5), ready_s=end_s))


class HeldDevice:
    """Its steps end when the test says so. launched: whether each has prompts, as it is on its way."""

    def __init__(self) -> None:
        self.launched: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.may_end = threading.Semaphore(0)

    def launch(self, plan: StepPlan) -> StepHandle:
        if plan.is_empty:
            return StepHandle(plan)
        self.launched.put(bool(plan.chunks))
        num_tokens = sum(len(part.sampled_choices) for part in plan.slices)
        return StepHandle(plan, HeldChoice(torch.full((num_tokens,), 5), may_end=self.may_end))


@dataclass(frozen=True, slots=True)
class HeldChoice(SampledTokens):
    may_end: threading.Semaphore = field(default_factory=threading.Semaphore)

    @property
    def is_on_the_way(self) -> bool:
        return True

    def read_tokens(self) -> list[int]:
        assert self.may_end.acquire(timeout=PATIENCE_S)
        return SampledTokens.read_tokens(self)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[tuple[BareEngine, Device]]:
    save_tiny_model(tmp_path)
    size = EngineSize(32, 256, 64, capacity_tokens=8192, device="cpu")
    engine, device = BareEngine(str(tmp_path), "float32", "auto", size, lag=1), Device()
    engine.runner.launch = device.launch  # type: ignore[method-assign]
    with engine:
        yield engine, device


def test_a_queue_of_prompts_is_computed_without_a_pause(device: tuple[BareEngine, Device]) -> None:
    """Where the machine stands still again and again it is asked once more: who waits for steps does so each time."""
    engine, card = device
    shares = list[float]()
    while not shares or (len(shares) < 3 and shares[-1] >= MOST_OF_IT_BUSY):
        card.spans.clear()
        streams = engine.run([[7 + i] * 100 for i in range(24)], [20] * 24, GREEDY)
        assert [len(stream.tokens) for stream in streams] == [20] * 24
        busy_s = sum(end_s - start_s for start_s, end_s in card.spans)
        assert busy_s > 3.0
        pauses_s = sorted(then[0] - before[1] for before, then in pairwise(card.spans))
        assert len(pauses_s) > 30
        shares.append(sum(pauses_s[:-3]) / busy_s)  # besides the longest: in those the machine may stand still
    assert shares[-1] < MOST_OF_IT_BUSY, shares


def test_two_lanes_have_the_next_step_of_a_lone_row_on_its_way_while_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else happens that would wake the engine: from the first row on there are two in flight."""
    for module in (engine_module, two_lane_module):
        monkeypatch.setattr(module, "_MAX_IDLE_S", 3600.0)
    save_tiny_model(tmp_path)
    size, card = EngineSize(32, 256, 64, capacity_tokens=8192, device="cpu"), HeldDevice()
    engine = BareEngine(str(tmp_path), "float32", "auto", size, lag=1, lanes=LaneObjectives())
    engine.runner.launch = card.launch  # type: ignore[method-assign]
    channel: Any = SimpleNamespace(router_id="test")
    engine.sender.streams["alone"] = TimedTokens()
    spec = GenerationSpec(tuple(range(7, 27)), (0,), 20, frozenset(), GREEDY)
    with engine:
        future = engine.engine.generate(GenerateCall("alone", spec, PATIENCE_S, channel, source=None))
        assert card.launched.get(timeout=PATIENCE_S), "its prompt"
        card.may_end.release()
        for _ in range(9):
            assert not card.launched.get(timeout=PATIENCE_S)
            assert not card.launched.get(timeout=PATIENCE_S), "while the row in front of it runs"
            card.may_end.release(2)
        card.may_end.release(100)
        assert future.result(PATIENCE_S).status is CallStatus.OK
    assert len(engine.sender.streams["alone"].tokens) == 20
