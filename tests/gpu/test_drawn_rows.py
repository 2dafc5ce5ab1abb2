"""The second phase on a card: tokens of held rows, of others and of prompts, by the kernels that draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from replicas.model.model_runner import StepHandle
from replicas.sampling.rules.token_masks import TokenMasks
from replicas.sampling.sample_place import SamplePlace
from replicas.sampling.sampled_tokens import NOTHING_ALLOWED, sample_tokens
from replicas.sampling.slot_state import SlotState
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan
from scheduler.sampling_params import SamplingParams

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda.runner import CardForward, CudaRunner
from replicas.cuda.slots import CudaSlots

pytestmark = pytest.mark.interpreted

VOCAB_SIZE = 700
OF_PROMPT = SamplingParams(temperature=0.8, top_k=8, top_p=0.9, seed=4)
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_k=5, seed=3),
    OF_PROMPT,
    OF_PROMPT,
)
INITS = tuple(SlotInit(slot, 0, params, 7) for slot, params in enumerate(PARAMS))
PROMPT = Slice.of_prompt("p", 2, 0, (5, 6, 7), (SampleTarget(2, 0), SampleTarget(3, 1)))
PLAN = StepPlan(1, (), (), (), (Slice("a", 0, 0, 9), Slice("b", 0, 1, 4), PROMPT))


class LogitsRunner(CudaRunner):
    """Its passes are logits that are given; nothing goes to a host."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._slots = CudaSlots(len(PARAMS), 1, 16, logits.device)
        self._slots.apply(StepPlan(0, INITS, (), (), ()))
        self._graphs = self._drafts = None
        self._given = logits
        self.host_pool: Any = type("NoHostPool", (), {"move": lambda self, plan: None})()

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        return self._given.clone()

    def _on_the_way(self, choice: Any, prompts: Any) -> Any:
        return choice, prompts


def masks_of(allowed: dict[int, list[int]]) -> TokenMasks:
    bits = np.zeros((len(allowed), 32 * -(-VOCAB_SIZE // 32)), dtype=np.uint8)
    for place, ids in enumerate(allowed.values()):
        bits[place, ids] = 1
    return TokenMasks(tuple(allowed), np.packbits(bits, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize(
    "masks",
    [None, masks_of({1: [3, 5, 600]}), masks_of({0: [9], 2: list(range(100)), 3: [1, 2]}), masks_of({1: [], 3: [4]})],
)
def test_they_are_those_of_the_base(device: torch.device, masks: TokenMasks | None) -> None:
    """Also where no row has a mask for now: its grammar sleeps."""
    logits = 3 * torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    base = SlotState(len(PARAMS), 1, 16)
    base.apply(StepPlan(0, INITS, (), (), ()))
    places = SamplePlace.all_of(PLAN)
    expected = sample_tokens(logits.clone(), places, base, masks).read_tokens()
    runner = LogitsRunner(logits.to(device))
    forwarded = runner.forward(PLAN)
    assert isinstance(forwarded, CardForward)
    assert forwarded.drawn is not None
    assert runner._slots.last_token[:4].tolist() == [7] * 4, "nothing is chosen yet"
    tokens = [token.token_id for token in runner.choose(forwarded, masks).result().tokens]
    assert tokens == expected
    assert (tokens[1] == NOTHING_ALLOWED) == (masks is not None and masks.rows == (1, 3))
    assert runner._slots.last_token[:4].tolist() == base.last_token[:4].tolist()


def test_rows_that_the_kernels_do_not_know_are_the_bases(device: torch.device) -> None:
    runner = LogitsRunner(torch.zeros(4, VOCAB_SIZE, device=device))
    penalty = SlotInit(1, 0, SamplingParams(temperature=0.0, repetition_penalty=1.5), 7)
    runner._slots.apply(StepPlan(1, (penalty,), (), (), ()))
    forwarded = runner.forward(PLAN)
    assert isinstance(forwarded, CardForward)
    assert forwarded.drawn is None


def test_a_draw_that_fails_leaves_the_slots_as_they_were(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is run again in pieces, from the tokens that it was planned with."""
    runner = LogitsRunner(torch.randn(4, VOCAB_SIZE, device=device))
    forwarded = runner.forward(PLAN)

    def failing(*_: Any) -> StepHandle:
        raise RuntimeError("no pinned memory")

    with monkeypatch.context() as patched:
        patched.setattr(runner, "_on_the_way", failing)
        with pytest.raises(RuntimeError, match="no pinned memory"):
            runner.choose(forwarded, masks_of({0: [9]}))
    assert runner._slots.last_token[:4].tolist() == [7] * 4
    assert runner.choose(runner.forward(PLAN), masks_of({0: [9]})).result().tokens[0].token_id == 9
