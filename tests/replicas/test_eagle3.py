"""EAGLE-3 heads against an implementation that shares nothing with ours: what they write into blocks, and draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.model_runner import ModelRunner
from replicas.model_support import UnsupportedModel
from replicas.speculation.draft_loading import load_head
from replicas.speculation.eagle3_runner import Eagle3Runner
from scheduler.plan import RuleContext, SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams
from tests.engines.tiny_model import tiny_settings
from tests.replicas.eagle3_reference import (
    Reference,
    Tensors,
    config_of,
    random_tensors,
    save_eagle,
    save_speculators,
)

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_LAYERS = 6
GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple((31 * i + 5) % 512 for i in range(11))
TABLE = tuple((7 * i + 3) % 24 for i in range(12))
CONFIG = config_of(hidden_size=64, num_heads=4, num_kv_heads=2, vocab_size=512, draft_vocab_size=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with layers enough for EAGLE's own three: in front of layers 2, 3 and 3."""
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> LoadedModel:
    return load_model(tiny_settings("decode", folder).model, CPU)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """By transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def states_of(model: Any, ids: list[int], layer_ids: tuple[int, ...] = (2, 3, 3)) -> Tensor:
    """By transformers alone: what is in front of these layers, [len(ids), 3 * 64]."""
    last: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, arguments, output: last.append(output))
    with torch.inference_mode():
        hidden = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hook.remove()
    states = (*hidden[:-1], last[0])  # its last one is behind the norm
    return torch.cat([states[layer_id][0] for layer_id in layer_ids], dim=1)


def make_runner(served: LoadedModel, source: Path) -> Eagle3Runner:
    """Wherever nobody has written, its pool holds what is no number."""
    head = load_head(str(source), served, CPU)
    layout = replace(served.kv_layout(BLOCK_SIZE), num_extra_layers=1)
    runner = Eagle3Runner(served, KvPool(layout, 24, CPU), 4, 48, head=head)
    runner.pool.tensor.fill_(torch.nan)
    return runner


def run(runner: ModelRunner, *slices: Slice, inits: tuple[SlotInit, ...] = (), has_drafts: bool = False) -> list[int]:
    writes = tuple(TableWrite(init.slot, 0, TABLE) for init in inits)
    output = runner.launch(StepPlan(0, inits, writes, (), slices, has_drafts=has_drafts)).result()
    return [token.token_id for token in output.tokens]


def begin(runner: ModelRunner, chunks: tuple[int, ...] = (11,), sampling: SamplingParams = GREEDY) -> list[int]:
    """The prompt in chunks that end there; prompt and first token."""
    inits: tuple[SlotInit, ...] = (SlotInit(0, 0, sampling, None, RuleContext(PROMPT, len(PROMPT)), may_draft=True),)
    start = 0
    for end in chunks:
        targets = (SampleTarget(0, 0),) if end == len(PROMPT) else ()
        tokens = run(runner, Slice.of_prompt("r", 0, start, PROMPT[start:end], targets), inits=inits)
        inits, start = (), end
    return [*PROMPT, *tokens]


def head_keys_values(runner: ModelRunner, length: int) -> tuple[Tensor, Tensor]:
    """Of the layer behind the model's, by position: each [length, KV heads, head_dim]."""
    blocks = runner.pool.tensor[list(TABLE), NUM_LAYERS]
    keys, values = blocks[:, 0].flatten(0, 1), blocks[:, 1].flatten(0, 1)
    return keys[:length], values[:length]


def saved(folder: Path, form: str, tensors: Tensors, **said: Any) -> Path:
    if form == "eagle":
        save_eagle(folder, CONFIG, tensors)
    else:
        save_speculators(folder, CONFIG, tensors, **said)
    return folder


FORMS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "speculators": {"norm_before_residual": True},
    "layers": {"norm_output": True, "eagle_aux_hidden_state_layer_ids": [0, 4, 6]},
}


def reference_of(form: str, tensors: Tensors) -> tuple[Reference, tuple[int, ...]]:
    said = FORMS[form]
    reference = Reference(CONFIG, tensors, said.get("norm_before_residual", False), said.get("norm_output", False))
    return reference, tuple(said.get("eagle_aux_hidden_state_layer_ids", (2, 3, 3)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunks", [(11,), (3, 8, 11)])
def test_prompts_and_drafts(
    alone: Any, served: LoadedModel, tmp_path: Path, form: str, chunks: tuple[int, ...]
) -> None:
    """In both forms: its keys and values at each position of a prompt in one chunk or in several, and its drafts."""
    tensors = random_tensors(CONFIG)
    runner = make_runner(served, saved(tmp_path / "head", form, tensors, **FORMS[form]))
    reference, layer_ids = reference_of(form, tensors)
    ids = begin(runner, chunks)
    states = states_of(alone, ids[:-1], layer_ids)
    expected = reference.keys_values(reference.fused(states), torch.tensor(ids[1:]))
    for ours, theirs in zip(head_keys_values(runner, len(PROMPT)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert drafted(runner, len(ids) - 1, 5) == reference.drafts(states, ids, 5)


def drafted(runner: Eagle3Runner, position: int, count: int) -> list[int]:
    """What it drafts behind the token there; computes the row."""
    forwarded = runner.forward(StepPlan(0, (), (), (), (row(position, count),), has_drafts=True))
    return list(forwarded.plan.slices[0].token_ids)


def row(position: int, num_drafts: int) -> Slice:
    return Slice("r", 0, 0, position, 1 + num_drafts, 1 + num_drafts, num_drafts=num_drafts)


def test_rows(alone: Any, served: LoadedModel, tmp_path: Path) -> None:
    """With drafts, most of which are wrong, and without: what is known of the sequence is right in its layer, every
    time, and so are its drafts; its text is the one without a head."""
    tensors = random_tensors(CONFIG)
    runner = make_runner(served, saved(tmp_path / "head", "eagle", tensors))
    reference = Reference(CONFIG, tensors)
    plain = ModelRunner(served, KvPool(served.kv_layout(BLOCK_SIZE), 24, CPU), 4, 48)
    ids, text = begin(runner), begin(plain)
    for num_drafts in (3, 0, 2, 7, 0, 1):
        length = len(ids) - 1
        if num_drafts:
            states = states_of(alone, ids[:-1])
            assert drafted(runner, length, num_drafts) == reference.drafts(states, ids, num_drafts)
        ids += run(runner, row(length, num_drafts), has_drafts=num_drafts > 0)
        states = states_of(alone, ids[:-1])
        expected = reference.keys_values(reference.fused(states), torch.tensor(ids[1:]))
        for ours, theirs in zip(head_keys_values(runner, len(ids) - 1), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    while len(text) < len(ids):
        text += run(plain, row(len(text) - 1, 0))
    assert ids == text


def test_embeddings_of_the_served_model(alone: Any, served: LoadedModel, tmp_path: Path) -> None:
    """Where it has none of its own."""
    tensors = random_tensors(CONFIG, has_own_embeddings=False)
    runner = make_runner(served, saved(tmp_path / "head", "eagle", tensors))
    ids = begin(runner)
    embeddings: Any = served.model
    reference = Reference(CONFIG, {**tensors, "embed_tokens.weight": embeddings.get_input_embeddings().weight})
    assert drafted(runner, len(ids) - 1, 4) == reference.drafts(states_of(alone, ids[:-1]), ids, 4)


def test_looking_changes_no_number(served: LoadedModel, tmp_path: Path) -> None:
    runner = make_runner(served, saved(tmp_path / "head", "eagle", random_tensors(CONFIG)))
    plain = ModelRunner(served, KvPool(served.kv_layout(BLOCK_SIZE), 24, CPU), 4, 48)
    init = SlotInit(0, 0, GREEDY, None, RuleContext(PROMPT, len(PROMPT)))
    chunk = Slice.of_prompt("r", 0, 0, PROMPT, (SampleTarget(0, 0),))
    plan = StepPlan(0, (init,), (TableWrite(0, 0, TABLE),), (), (chunk,))
    assert torch.equal(runner.logits(plan), plain.logits(plan))
    assert torch.equal(runner.pool.tensor[list(TABLE[:2]), :NUM_LAYERS], plain.pool.tensor[list(TABLE[:2])])


def _without(name: str) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: tensors.__delitem__(name)


def _said(**values: Any) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: config.update(values)


def _another(name: str, tensor: Tensor) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("fc.weight"), "lacks fc.weight"),
        (_another("midlayer.extra.weight", torch.ones(3)), "no place for layer.extra.weight"),
        (_another("fc.weight", torch.ones(64, 128)), "lacks fc.weight"),
        (_another("d2t", torch.full((200,), 511)), "are not as many tokens"),
        (_said(architectures=["LlamaForCausalLM"]), "no EAGLE-3 head: its architectures name LlamaForCausalLM"),
        (_said(hidden_size=32), "another model's head: of hidden size 32"),
        (_said(vocab_size=600), "another model's head: of 600 tokens"),
        (_said(num_hidden_layers=2), "num_hidden_layers 2, which is not supported"),
        (_said(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "positions of kind 'dynamic'"),
        (_said(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), "in front of layers .1, 2, 9., of 6 in all"),
    ],
)
def test_refusals(
    served: LoadedModel, tmp_path: Path, change: Callable[[dict[str, Any], Tensors], None], message: str
) -> None:
    """By name, each with what is wrong."""
    config, tensors = dict(CONFIG), random_tensors(CONFIG)
    change(config, tensors)
    save_eagle(tmp_path / "head", config, tensors)
    with pytest.raises(UnsupportedModel, match=message) as refusal:
        load_head(str(tmp_path / "head"), served, CPU)
    assert str(refusal.value).startswith("speculative.model: ")
