"""A step's forward pass and its choice of tokens, apart: what comes in between decides, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.model_runner import ModelRunner
from replicas.sampling.rules.token_masks import TokenMasks
from replicas.sampling.sampled_tokens import NOTHING_ALLOWED
from scheduler.plan import BlockSwap, SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams
from tests.engines.tiny_model import save_tiny_model, tiny_settings

CPU = torch.device("cpu")
WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5, num_logprobs=4),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
)
PROMPTS = [tuple((17 * i + slot) % 512 for i in range(6 + slot)) for slot in range(len(WAYS))]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return load_model(tiny_settings("decode", folder).model, CPU)


def begun(loaded: LoadedModel) -> ModelRunner:
    """Prompts computed, and a step of a row each to come."""
    runner = ModelRunner(loaded, KvPool(loaded.kv_layout(8), 12, CPU), 4, 64, num_host_blocks=2)
    inits = tuple(SlotInit(slot, 0, way, None) for slot, way in enumerate(WAYS))
    writes = tuple(TableWrite(slot, 0, (3 * slot, 3 * slot + 1, 3 * slot + 2)) for slot in range(len(WAYS)))
    chunks = tuple(Slice.of_prompt(f"r{s}", s, 0, ids, (SampleTarget(s, 0),)) for s, ids in enumerate(PROMPTS))
    runner.launch(StepPlan(0, inits, writes, (), chunks))
    return runner


ROWS = StepPlan(1, (), (), (), tuple(Slice(f"r{slot}", 0, slot, len(ids)) for slot, ids in enumerate(PROMPTS)))


def all_but(forbidden: list[list[int]]) -> TokenMasks:
    """Of the first rows: all but these tokens. A tokenizer may know more than the model has logits for."""
    bits = np.ones((len(forbidden), 512 + 64), dtype=np.uint8)
    for row, ids in enumerate(forbidden):
        bits[row, ids] = 0
    return TokenMasks(tuple(range(len(forbidden))), np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def test_apart_they_do_what_one_launch_does(loaded: LoadedModel) -> None:
    together, apart = begun(loaded), begun(loaded)
    expected = together.launch(ROWS).result()
    forwarded = apart.forward(ROWS)
    assert torch.equal(apart._slots.last_token, begun(loaded)._slots.last_token), "nothing is chosen yet"
    assert apart.choose(forwarded).result() == expected
    assert torch.equal(apart._slots.last_token, together._slots.last_token)
    assert torch.equal(apart.pool.tensor, together.pool.tensor)


def test_what_is_forbidden_in_between_is_not_chosen(loaded: LoadedModel) -> None:
    """The best of a greedy row; the drawn token of a sampled one, whose log-probabilities stay the model's own."""
    expected = begun(loaded).launch(ROWS).result().tokens
    runner = begun(loaded)
    forwarded = runner.forward(ROWS)
    assert forwarded.logits is not None
    logits = forwarded.logits.clone()
    masks = all_but([[expected[row].token_id] for row in (0, 1)])
    tokens = runner.choose(forwarded, masks).result().tokens
    assert tokens[0].token_id == int(logits[0].topk(2).indices[1])
    assert tokens[1].token_id != expected[1].token_id
    assert tokens[1].logprobs is not None
    own = logits[1].log_softmax(-1)
    assert tokens[1].logprobs.logprob == pytest.approx(float(own[tokens[1].token_id]), abs=1e-6)
    assert [token_id for token_id, _ in tokens[1].logprobs.top] == own.topk(4).indices.tolist()
    assert tokens[2] == expected[2], "nobody forbade it anything"
    assert runner._slots.last_token[:3].tolist() == [token.token_id for token in tokens]


def test_a_row_with_everything_forbidden_says_so(loaded: LoadedModel) -> None:
    runner = begun(loaded)
    nothing = TokenMasks((1,), np.zeros((1, 16), dtype=np.int32))
    tokens = runner.choose(runner.forward(ROWS), nothing).result().tokens
    assert [token.token_id == NOTHING_ALLOWED for token in tokens] == [False, True, False]


def test_a_step_that_only_moves_blocks_has_nothing_to_choose(loaded: LoadedModel) -> None:
    runner = begun(loaded)
    before = runner.pool.tensor[4].clone()
    forwarded = runner.forward(StepPlan(1, (), (), (), (), swap_outs=(BlockSwap(4, 1),)))
    assert forwarded.logits is None
    assert torch.equal(runner.host_pool.tensor[1], before)
    assert runner.choose(forwarded).result().tokens == ()


def test_scores_of_a_prompt_come_with_its_tokens(loaded: LoadedModel) -> None:
    ids = PROMPTS[2]
    chunk = Slice.of_prompt("s", 0, 0, ids, (SampleTarget(0, 0),), ids[1:])
    init = SlotInit(0, 0, SamplingParams(temperature=0.0, num_prompt_logprobs=2), None)
    plan = StepPlan(2, (init,), (), (), (chunk,))
    expected = begun(loaded).launch(plan).result()
    runner = begun(loaded)
    output = runner.choose(runner.forward(plan)).result()
    assert output == expected
    assert len(output.prompts[0].positions) == len(ids)
