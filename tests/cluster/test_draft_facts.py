"""What is found of a model that drafts before anything starts, in a folder or on the Hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cluster.config.file import config_of
from cluster.config.root import Config
from cluster.launch import draft_facts
from cluster.launch.draft_facts import find_draft
from cluster.launch.model_facts import DraftFacts
from cluster.user_error import ConfigError
from replicas.hub_model import HubModel, HubRefusal, HubUnreachable

SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
HEAD = {**SMALL, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 100}
SPECULATORS = {"speculators_model_type": "eagle3", "transformer_layer_config": HEAD, "draft_vocab_size": 100}


def config(method: str, model: str) -> Config:
    pool = {"kv_capacity_tokens": 8192}
    return config_of(
        {"pools": {"prefill": dict(pool), "decode": dict(pool)}, "speculative": {"method": method, "model": model}}
    )


def save(folder: Path, said: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(said))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"some.weight": torch.zeros(10, 100)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("method", "said", "facts"),
    [
        ("draft_model", SMALL, DraftFacts(1000, 3 * 2 * 2 * 16)),
        ("eagle3", HEAD, DraftFacts(1000, 2 * 2 * 16, is_head=True)),
        ("eagle3", SPECULATORS, DraftFacts(1000, 2 * 2 * 16, is_head=True)),
    ],
)
def test_a_folder(tmp_path: Path, method: str, said: dict[str, Any], facts: DraftFacts) -> None:
    found = find_draft(config(method, str(save(tmp_path, said))))
    assert found is not None
    assert (found.facts, found.hub, found.folder) == (facts, None, None)


@pytest.mark.parametrize(
    ("method", "said", "message"),
    [
        ("eagle3", SMALL, "is of no EAGLE-3 head; a small model is named with method: draft_model"),
        ("draft_model", HEAD, "something other than causal language modelling"),
        ("draft_model", {**SMALL, "model_type": "strange"}, "does not know model_type 'strange'"),
    ],
)
def test_refusals(tmp_path: Path, method: str, said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        find_draft(config(method, str(save(tmp_path, said))))
    assert str(refusal.value).startswith("speculative.model: ")


def test_nobody_drafts() -> None:
    pool = {"kv_capacity_tokens": 8192}
    assert find_draft(config_of({"pools": {"prefill": dict(pool), "decode": dict(pool)}})) is None


def _raising(error: Exception) -> Callable[..., HubModel]:
    def find(hub_id: str, trust_remote_code: bool, key: str) -> HubModel:
        assert (hub_id, key) == ("org/small", "speculative.model")
        raise error

    return find


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked by its key; without an answer a copy of an earlier start is used."""
    folder = save(tmp_path, SMALL)
    there = HubModel("org/small", folder / "config.json", {"F32": 77}, (), 308)
    monkeypatch.setattr(draft_facts, "find_on_hub", lambda *_: there)
    found = find_draft(config("draft_model", "org/small"))
    assert found is not None
    assert (found.facts.num_weights, found.hub) == (77, there)
    monkeypatch.setattr(draft_facts, "find_on_hub", _raising(HubUnreachable("speculative.model: no answer")))
    monkeypatch.setattr(draft_facts, "copy_in_cache", lambda _: folder)
    found = find_draft(config("draft_model", "org/small"))
    assert found is not None
    assert (found.facts.num_weights, found.hub, found.folder) == (1000, None, folder)
    monkeypatch.setattr(draft_facts, "copy_in_cache", lambda _: None)
    with pytest.raises(ConfigError, match="no answer"):
        find_draft(config("draft_model", "org/small"))
    monkeypatch.setattr(draft_facts, "find_on_hub", _raising(HubRefusal("speculative.model: no such model")))
    with pytest.raises(ConfigError, match="no such model"):
        find_draft(config("draft_model", "org/small"))
