"""Engines with an EAGLE-3 head: every text is the one without, its layer goes wherever blocks go, its drafts hold."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from replicas.model_identity import UnlikeModels, model_of, refuse_unlike
from replicas.serving import device_runner, engine_builder
from replicas.settings import EngineSettings, SpeculationSettings
from scheduler.admission import AdmissionPolicy
from scheduler.constant_drafts import ConstantDrafts
from scheduler.length_estimator import LengthEstimator
from scheduler.sampling_params import SamplingParams
from tests.engines.local_system import GREEDY, Generated, LocalSystem
from tests.engines.tiny_model import tiny_settings
from tests.replicas.eagle3_reference import config_of, random_tensors, save_eagle, save_speculators

PROMPTS = [[(7 * number + 13 * index) % 500 for index in range(9 + 17 * number)] for number in range(4)]
SAMPLED = SamplingParams(temperature=1.0, seed=11)
WIDTH, NUM_HEADS, HEAD_DIM = 64, 4, 16
_CONSTANT = 4.0  # a number that every token's embedding begins with
_FOCUS = 60.0


def save_served(folder: Path) -> None:
    """A model whose layers add next to nothing: which token follows depends on the last one alone."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.model.embed_tokens.weight[:, 0] = _CONSTANT
        model.lm_head.weight.normal_(std=0.4)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e-4)
            layer.mlp.down_proj.weight.mul_(1e-4)
    model.save_pretrained(folder)


def save_head(folder: Path, served: Path) -> None:
    """One that looks at the embedding of the last token alone, and so is right, about the half of the tokens that it
    drafts."""
    config = config_of(WIDTH, NUM_HEADS, NUM_HEADS, vocab_size=512, draft_vocab_size=256)
    tensors = random_tensors(config, has_own_embeddings=False)
    model: Any = AutoModelForCausalLM.from_pretrained(served, dtype=torch.float32)
    for name in ("fc", "midlayer.mlp.down_proj"):
        tensors[f"{name}.weight"] *= 1e-4
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(WIDTH)
    asked = torch.zeros(NUM_HEADS, HEAD_DIM, 2 * WIDTH)
    asked[:, :, 0] = _FOCUS  # queries and keys alike at each position: turned, they meet best at their own
    eye = torch.eye(WIDTH)
    tensors |= {
        "midlayer.self_attn.q_proj.weight": asked.view(WIDTH, 2 * WIDTH),
        "midlayer.self_attn.k_proj.weight": asked.view(WIDTH, 2 * WIDTH).clone(),
        "midlayer.self_attn.v_proj.weight": torch.cat((eye, torch.zeros(WIDTH, WIDTH)), dim=1),
        "midlayer.self_attn.o_proj.weight": eye.clone(),
        "lm_head.weight": model.lm_head.weight.detach()[tensors["d2t"] + torch.arange(256)],
    }
    save_eagle(folder, config, tensors)


@pytest.fixture(autouse=True)
def always_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever time it takes."""
    monkeypatch.setattr(device_runner, "Speculator", lambda policy: ConstantDrafts(policy.max_drafts))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    served, head = (tmp_path_factory.mktemp(name) for name in ("served", "head"))
    save_served(served)
    save_head(head, served)
    return served, head


def with_head(pool: str, folders: tuple[Path, Path], **changes: Any) -> EngineSettings:
    speculative = SpeculationSettings("eagle3", str(folders[1]), max_drafts=4)
    return tiny_settings(pool, folders[0], speculative=speculative, **changes)


def run(system: LocalSystem) -> list[Generated]:
    """Greedy and sampled, alone and with three choices, all at once."""
    return system.run(
        [system.generation(prompt, 40, GREEDY) for prompt in PROMPTS]
        + [system.generation(prompt, 40, SAMPLED, num_choices=3) for prompt in PROMPTS[:2]]
    )


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> Iterator[list[Generated]]:
    system = LocalSystem(tiny_settings("decode", folders[0]), None)
    yield run(system)
    system.close()


@pytest.mark.parametrize(("is_split", "lag"), [(True, 1), (False, 0)])
def test_texts_are_those_without(folders: tuple[Path, Path], plain: list[Generated], is_split: bool, lag: int) -> None:
    """And drafts hold, of sequences that came from another engine, too."""
    system = LocalSystem(with_head("decode", folders, lag=lag), with_head("prefill", folders) if is_split else None)
    try:
        texts = run(system)
        asyncio.run(system.wait_for_baseline())
        engine = system.decode.engine
        tokens_a_row = engine.scheduler.batch.num_forwarded_tokens / engine.steps.num_rows
    finally:
        system.close()
    assert [one.token_ids for one in texts] == [one.token_ids for one in plain]
    assert tokens_a_row > 1.3


def test_requests_that_give_way(folders: tuple[Path, Path], plain: list[Generated]) -> None:
    """Their blocks come back from host memory with the head's layer."""
    settings = with_head(
        "decode", folders, lag=1, kv_capacity_tokens=512, host_memory_bytes=1 << 26,
        admission=AdmissionPolicy(quantile=0.05, min_samples=1),
    )  # fmt: skip
    system = LocalSystem(settings, None)
    estimator = system.decode.engine.scheduler.budget.estimator
    assert isinstance(estimator, LengthEstimator)
    for _ in range(100):  # outputs were very short so far
        estimator.observe(4)
    try:
        texts = run(system)
        engine = system.decode.engine
        assert engine.scheduler.preemption.num_swapped > 0
        assert engine.scheduler.batch.num_forwarded_tokens > engine.steps.num_rows
    finally:
        system.close()
    assert [one.token_ids for one in texts] == [one.token_ids for one in plain]


def test_blocks_go_between_equal_heads_only(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A block has a layer more; whoever has another head, or none, can go on with a text, but not with blocks."""
    config = config_of(WIDTH, NUM_HEADS, NUM_HEADS, vocab_size=512, draft_vocab_size=256)
    save_speculators(tmp_path / "other", config, random_tensors(config))
    peers, num_bytes = [], []
    for settings in (
        with_head("prefill", folders),
        with_head("decode", folders),
        with_head("decode", (folders[0], tmp_path / "other")),
        tiny_settings("decode", folders[0]),
    ):
        built = engine_builder.build_engine(settings, "replica")
        peers.append(built.peer.fingerprint)
        num_bytes.append(built.peer.block_bytes)
        built.transfers.stop()
    refuse_unlike(peers[0], peers[1])
    for other in peers[2:]:
        assert model_of(other) == model_of(peers[0])
        with pytest.raises(UnlikeModels, match="unlike kv"):
            refuse_unlike(peers[0], other)
    assert num_bytes[0] * 6 == num_bytes[3] * 7
