"""The CUDA runner with drafts: texts are those without, however good the drafts are, and however many steps are in
flight before one of them is known.

On a card as it is; in Triton's interpreter as `test_cuda_runner`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel
from replicas.model.model_runner import StepHandle
from replicas.speculation.drafter import NO_DRAFT, DraftRow
from scheduler.plan import RuleContext, SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda.card_drafts import CardDrafting, columns_of, row_tokens
from replicas.cuda.card_ngram_drafter import CardNgramDrafter
from replicas.cuda.runner import CudaRunner
from replicas.cuda.slots import CudaSlots
from replicas.kernels.slot_columns import HISTORY, LENGTH
from tests.gpu.test_cuda_runner import CalledGraph, card, load  # noqa: F401 - a fixture

pytestmark = pytest.mark.interpreted

NUM_SLOTS, MAX_LEN, BLOCKS_A_SLOT, MAX_DRAFTS = 6, 112, 7, 4
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_k=12, seed=5)


def make_runner(loaded: LoadedModel, device: torch.device, drafting: CardDrafting | None) -> CudaRunner:
    pool = KvPool(loaded.kv_layout(16), NUM_SLOTS * BLOCKS_A_SLOT + 1, device)
    return CudaRunner(loaded, pool, NUM_SLOTS, MAX_LEN, drafting=drafting)


class ScriptedDrafter:
    """Knows each slot's text, or so it thinks: of its drafts one in so many is wrong, and some are not made."""

    def __init__(self, slots: CudaSlots, texts: dict[int, list[int]], wrong_in: int) -> None:
        self._slots, self._rng, self._wrong_in = slots, random.Random(7), wrong_in
        width = MAX_LEN + 16
        self._texts = torch.full((NUM_SLOTS, width), NO_DRAFT, dtype=torch.int64)
        for slot, text in texts.items():
            self._texts[slot, : len(text)] = torch.tensor(text)
        self._texts = self._texts.to(slots.state.device)
        self.told: list[tuple[int, int]] = []

    def start(self, init: SlotInit) -> None:
        pass

    def draft(self, rows: Sequence[DraftRow]) -> torch.Tensor:
        most = max(row.num_drafts for row in rows)
        slots = torch.tensor([row.slot for row in rows], device=self._texts.device)
        places = self._slots.length[slots][:, None] + 1 + torch.arange(most, device=slots.device)
        drafts = self._texts[slots].gather(1, places.clamp(max=self._texts.shape[1] - 1))
        for row in range(len(rows)):
            for column in range(most):
                if self._rng.randrange(self._wrong_in) == 0:
                    drafts[row, column] = (drafts[row, column] + 1) % 290 if self._rng.random() < 0.7 else NO_DRAFT
        return drafts

    def accepted(self, slots: Sequence[int], tokens: torch.Tensor, counts: torch.Tensor) -> None:
        assert tokens.shape[0] == counts.shape[0] == len(slots)
        self.told += [(slot, int(count)) for slot, count in zip(slots, counts.tolist(), strict=True)]


@dataclass
class Sequence_:
    """What a host knows of one: its tokens, and how far steps in flight may bring it."""

    slot: int
    tokens: list[int]
    prompt_len: int
    in_flight: int = 0
    taken: list[int] = field(default_factory=list)  # how many counted, step by step


class Host:
    """Plans as a scheduler does, `lag` steps ahead of what it has read."""

    def __init__(self, runner: CudaRunner, num_new: int, sampling: SamplingParams, lag: int) -> None:
        self.runner, self.num_new, self.sampling, self.lag = runner, num_new, sampling, lag
        self.running: dict[int, Sequence_] = {}
        self.waiting: list[tuple[StepPlan, StepHandle]] = []
        self.step_id = 0

    def begin(self, prompts: dict[int, list[int]], may_draft: bool = True) -> None:
        """Prompts of slots, in one step."""
        inits, tables, chunks = [], [], []
        for slot, prompt in prompts.items():
            context = RuleContext(tuple(prompt), len(prompt))
            inits.append(SlotInit(slot, 0, self.sampling, None, context, may_draft=may_draft))
            blocks = range(1 + slot * BLOCKS_A_SLOT, 1 + (slot + 1) * BLOCKS_A_SLOT)
            tables.append(TableWrite(slot, 0, tuple(blocks)))
            chunks.append(Slice.of_prompt(str(slot), slot, 0, tuple(prompt), (SampleTarget(slot, 0),)))
            self.running[slot] = Sequence_(slot, list(prompt), len(prompt), 1)
        self.launch(StepPlan(self.step_id, tuple(inits), tuple(tables), (), tuple(chunks)))

    def launch(self, plan: StepPlan) -> None:
        self.waiting.append((plan, self.runner.launch(plan)))
        self.step_id += 1
        while len(self.waiting) > self.lag:
            self.read()

    def read(self) -> None:
        plan, handle = self.waiting.pop(0)
        output = handle.result()
        most = {part.request_id: part.num_sampled for part in plan.slices}
        got: dict[str, list[int]] = {name: [] for name in most}
        for token in output.tokens:
            got[token.request_id].append(token.token_id)
        accepted = {a.request_id: a for a in output.accepted}
        for name, tokens in got.items():
            sequence = self.running[int(name)]
            sequence.tokens += tokens
            sequence.in_flight -= most[name]
            sequence.taken.append(len(tokens))
            if name in accepted:
                assert accepted[name].num_accepted == len(tokens)
                assert accepted[name].num_sampled == most[name]
                assert accepted[name].num_drafted >= len(tokens) - 1

    def step(self, drafts: dict[int, int], chunks: tuple[Slice, ...] = (), **extra: object) -> None:
        """A row for each slot in drafts, with so many of them."""
        rows = []
        for slot, num_drafts in drafts.items():
            sequence = self.running[slot]
            start = len(sequence.tokens) - 1 + sequence.in_flight
            count = 1 + num_drafts
            sequence.in_flight += count
            rows.append(Slice(str(slot), 0, slot, start, count, count, num_drafts=num_drafts))
        has_drafts = any(drafts.values())
        self.launch(StepPlan(self.step_id, slices=(*rows, *chunks), has_drafts=has_drafts, **EMPTY | extra))  # type: ignore[arg-type]

    def run(self, num_drafts: dict[int, int]) -> dict[int, list[int]]:
        """Until every sequence has num_new tokens; slots in num_drafts get so many drafts a step."""
        while True:
            left = {
                slot: self.num_new - (len(s.tokens) - s.prompt_len)
                for slot, s in self.running.items()
                if len(s.tokens) - s.prompt_len + s.in_flight < self.num_new
            }
            if not left and not self.waiting:
                break
            if not left:
                self.read()
                continue
            self.step({slot: min(num_drafts.get(slot, 0), count - 1) for slot, count in left.items()})
        return {s.slot: s.tokens[s.prompt_len :][: self.num_new] for s in self.running.values()}


EMPTY = {"slot_inits": (), "table_writes": (), "copies": ()}
PROMPTS = {
    0: [7, 8, 9, 10] * 6, 1: [*range(20, 40)], 3: [5, 6, 5, 6, 7], 4: [50 + i % 7 for i in range(33)]
}  # fmt: skip
NUM_NEW = 24


def make_prompt_dependent(loaded: LoadedModel) -> None:
    """Random weights of a tiny model make one token over and over; larger ones make some text."""
    generator = torch.Generator().manual_seed(3)
    for parameter in loaded.model.parameters():
        if parameter.ndim == 2:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load(tmp_path_factory.mktemp("model"), device, "LlamaForCausalLM")
    make_prompt_dependent(loaded)
    return loaded
