"""Against transformers' prompt lookup, greedy: the same texts, by steps that accept as many drafts each.

transformers takes the earliest occurrence, of n-grams down to one token; ours the most recent one. So its rule is
played here by a drafter of the test's, and ours is compared on texts where both find the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from replicas.speculation.drafter import NO_DRAFT, DraftRow
from replicas.speculation.drafting_runner import DraftingRunner
from replicas.speculation.history import TokenHistory
from replicas.speculation.ngram_drafter import NgramDrafter, last_occurrence
from scheduler.plan import SlotInit
from scheduler.speculation import SpeculationState
from tests.engines.drafting_system import CountedDrafts, draft_with, drafting
from tests.engines.local_system import LocalSystem
from tests.engines.tiny_model import tiny_settings

NUM_TOKENS = 90
VOCAB_SIZE = 40
NUM_DRAFTS = 4
LONGEST = 3  # n-gram

Steps = list[tuple[int, int]]  # drafted, held


class EarliestDrafter:
    """As transformers', of one sequence."""

    def __init__(self, history: TokenHistory) -> None:
        self._history = history

    def start(self, init: SlotInit) -> None:
        pass

    def accepted(self, slots: Sequence[int], tokens: torch.Tensor, counts: torch.Tensor) -> None:
        pass

    def draft(self, rows: Sequence[DraftRow]) -> torch.Tensor:
        (row,) = rows
        found = earliest(self._history.of(row.slot).tolist(), row.num_drafts)
        return torch.tensor([found or [NO_DRAFT]])


def earliest(ids: list[int], num_drafts: int) -> list[int]:
    for size in range(min(LONGEST, len(ids) - 1), 0, -1):
        for start in range(len(ids) - size):
            if ids[start : start + size] == ids[-size:]:
                return ids[start + size : start + size + num_drafts]
    return []


class Recorded(CountedDrafts):
    """Each step's."""

    steps: Steps = []  # noqa: RUF012  its instances are frozen; one test looks at a time

    def accepted(self, state: SpeculationState, num_planned: int, num_drafted: int, num_accepted: int) -> None:
        Recorded.steps.append((num_drafted, num_accepted))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with few tokens, whose texts are full of what was there before, and loop in the end."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)  # stops nowhere
    return model


@pytest.fixture(scope="module")
def system(folder: Path) -> Iterator[LocalSystem]:
    system = LocalSystem(drafting(tiny_settings("decode", folder, has_prefix_cache=False)), None)
    yield system
    system.close()


def theirs(model: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Steps]:
    """transformers' text, and its steps behind the first token."""
    steps: Steps = []
    asked = PromptLookupCandidateGenerator.get_candidates

    def get_candidates(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        found, logits = asked(self, input_ids, **kwargs)
        steps.append((found.shape[1] - input_ids.shape[1], 0))
        return found, logits

    def update(self: Any, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        steps[-1] = steps[-1][0], int(num_matches)

    with monkeypatch.context() as patch:
        patch.setattr(PromptLookupCandidateGenerator, "get_candidates", get_candidates)
        patch.setattr(PromptLookupCandidateGenerator, "update_candidate_strategy", update)
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            prompt_lookup_num_tokens=NUM_DRAFTS,
            max_matching_ngram_size=LONGEST,
        )
    return whole[0, len(prompt) :].tolist(), steps


def ours(system: LocalSystem, prompt: list[int]) -> tuple[list[int], Steps]:
    planner = system.decode.engine.scheduler.drafts
    assert planner is not None
    planner._speculation = planner._speculation.__class__(
        Recorded(NUM_DRAFTS), NUM_DRAFTS, planner._speculation.can_draft
    )
    Recorded.steps.clear()
    (got,) = system.run([system.generation(prompt, NUM_TOKENS)])
    return got.token_ids[0], list(Recorded.steps)


def by_start(steps: Steps, at: int) -> dict[int, tuple[int, int]]:
    """By the number of tokens in front. Near the end each is cut in its own way: those are left out."""
    found = {}
    for drafted, held in steps:
        if at + NUM_DRAFTS + 1 < NUM_TOKENS:
            found[at] = drafted, held
        at += held + 1
    return found


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    found = []
    for _ in range(8):
        phrase = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(4, 30))]
        found.append([*phrase, *[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 9))], *phrase[:-2]])
    return found


def test_by_their_rule_every_step_accepts_as_many(
    system: LocalSystem, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = system.decode.engine.runner
    assert isinstance(runner, DraftingRunner)
    draft_with(system.decode, NUM_DRAFTS, EarliestDrafter(runner._history))
    num_held = 0
    for prompt in prompts():
        text, their_steps = theirs(model, prompt, monkeypatch)
        got, our_steps = ours(system, prompt)
        assert got == text
        # Our first token comes from the prompt's own step, theirs from a step with drafts.
        here, there = by_start(our_steps, 1), by_start(their_steps, 0)
        together = next(at for at in here if at in there)
        assert {at: here[at] for at in here if at >= together} == {at: there[at] for at in there if at >= together}
        num_held += sum(held > 0 for _, held in here.values())
    assert num_held > 20, "steps in which drafts hold"


def test_by_our_rule_a_step_accepts_as_many_where_both_draft_the_same(
    system: LocalSystem, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = system.decode.engine.runner
    assert isinstance(runner, DraftingRunner)
    draft_with(system.decode, NUM_DRAFTS, NgramDrafter(runner._history, 1, LONGEST))
    num_same = num_held = 0
    for prompt in prompts():
        text, their_steps = theirs(model, prompt, monkeypatch)
        got, our_steps = ours(system, prompt)
        assert got == text, "the text is the same by any rule"
        here, there = by_start(our_steps, 1), by_start(their_steps, 0)
        for at in here.keys() & there.keys():
            known = [*prompt, *text[:at]]
            start = last_occurrence(np.array(known, dtype=np.int32), 1, LONGEST)
            if known[start : start + NUM_DRAFTS] == earliest(known, NUM_DRAFTS):
                assert here[at] == there[at]
                num_same += 1
                num_held += here[at][1] > 0
    assert num_same > num_held > 5
