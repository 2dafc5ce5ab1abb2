"""An engine that plans one step ahead keeps the device busy, also where launching a step takes as long as computing it.

The model's part is played by a device that computes behind the host's back, in a fixed time a step. (Planning later, by
how long steps took before, was tried: with a queue the waits fed on themselves, until steps took five times as long.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.bare_engine import BareEngine, EngineSize
from replicas.model.model_runner import StepHandle
from replicas.sampling.sampled_tokens import SampledTokens
from scheduler.plan import StepPlan
from scheduler.sampling_params import SamplingParams
from tests.engines.tiny_model import save_tiny_model

ROWS_S, PROMPTS_S = 0.02, 0.1  # of the device, a step
LAUNCH_S = 0.09  # of the host, a step with prompts: the device begins meanwhile
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


@pytest.fixture
def device(tmp_path: Path) -> Iterator[tuple[BareEngine, Device]]:
    save_tiny_model(tmp_path)
    size = EngineSize(32, 256, 64, capacity_tokens=8192, device="cpu")
    engine, device = BareEngine(str(tmp_path), "float32", "auto", size, lag=1), Device()
    engine.runner.launch = device.launch  # type: ignore[method-assign]
    with engine:
        yield engine, device


def test_a_queue_of_prompts_is_computed_without_a_pause(device: tuple[BareEngine, Device]) -> None:
    engine, card = device
    streams = engine.run([[7 + i] * 100 for i in range(24)], [20] * 24, GREEDY)
    assert [len(stream.tokens) for stream in streams] == [20] * 24
    busy_s = sum(end_s - start_s for start_s, end_s in card.spans)
    assert busy_s > 3.0
    assert card.spans[-1][1] - card.spans[0][0] < 1.6 * busy_s
