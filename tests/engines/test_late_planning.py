"""With a step in flight the next one is planned late: what arrives meanwhile need not wait for a step more.

The model's part is played by a device that takes a fixed time a step and computes behind the host's back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.bare_engine import BareEngine, EngineSize
from replicas.model.model_runner import StepHandle
from replicas.token_choice.token_choice import TokenChoice
from scheduler.plan import StepPlan
from scheduler.sampling_params import SamplingParams
from tests.engines.tiny_model import save_tiny_model

STEP_S = 0.15
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class LateChoice(TokenChoice):
    """Tokens that are there at ready_s."""

    ready_s: float = 0.0

    @property
    def is_on_the_way(self) -> bool:
        return True

    def read_tokens(self) -> list[int]:
        time.sleep(max(0.0, self.ready_s - time.monotonic()))
        return TokenChoice.read_tokens(self)


class Device:
    """Runs steps one behind the other. starts: of each step that computes something, when, and its plan."""

    def __init__(self) -> None:
        self.starts: list[tuple[float, StepPlan]] = []

    def launch(self, plan: StepPlan) -> StepHandle:
        if plan.is_empty:
            return StepHandle(plan)
        start_s = max(time.monotonic(), self.starts[-1][0] + STEP_S if self.starts else 0.0)
        self.starts.append((start_s, plan))
        num_tokens = len(plan.rows) + sum(len(chunk.targets) for chunk in plan.chunks)
        return StepHandle(plan, LateChoice(torch.full((num_tokens,), 5), ready_s=start_s + STEP_S))

    def wait_for_steps(self, count: int) -> None:
        while len(self.starts) < count:
            time.sleep(0.002)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[tuple[BareEngine, Device]]:
    size = EngineSize(8, 256, 256, capacity_tokens=2048, device="cpu")
    save_tiny_model(tmp_path)
    engine, device = BareEngine(str(tmp_path), "float32", "auto", size, lag=1), Device()
    engine.runner.launch = device.launch  # type: ignore[method-assign]
    with engine:
        yield engine, device


def test_a_request_that_comes_during_a_step_is_in_the_one_behind_it(device: tuple[BareEngine, Device]) -> None:
    engine, card = device
    first = threading.Thread(target=engine.run, args=([[1, 2, 3]], [16], GREEDY))
    first.start()
    card.wait_for_steps(6)  # of rows alone, so that their pace is known
    last_start_s = card.starts[-1][0]
    time.sleep(max(0.0, last_start_s + STEP_S / 4 - time.monotonic()))
    asked_s = time.monotonic()
    engine.run([[7, 8, 9, 10]], [2], GREEDY)
    first.join()
    own_s = next(start_s for start_s, plan in card.starts if any(len(c.token_ids) == 4 for c in plan.chunks))
    assert [start_s for start_s, _ in card.starts if asked_s < start_s < own_s] == []
    gaps = [later - earlier - STEP_S for (earlier, _), (later, _) in zip(card.starts, card.starts[1:], strict=False)]
    assert sorted(gaps)[len(gaps) // 2] < STEP_S / 10  # and the device does not wait for it
