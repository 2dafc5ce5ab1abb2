"""The section `speculative`: what is refused and in which words, what replicas are told, what a start looks at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from cluster.config.file import config_of, load_config
from cluster.config.model import ModelConfig
from cluster.config.root import Config
from cluster.config.speculative import SpeculativeConfig
from cluster.launch.draft_facts import DraftFacts, draft_facts
from cluster.launch.fit import describe_memory, model_findings
from cluster.launch.machine import Machine
from cluster.launch.model_facts import BUNDLED_FACTS, ModelFacts
from cluster.serving.replica_settings import engine_settings
from cluster.user_error import ConfigError
from replicas.settings import SpeculationSettings
from scheduler.draft_acceptance import DRAFT_COUNTS

GB = 10**9
LAPTOP = Machine(2, 24 * GB, 20 * GB, no_gpu="no NVIDIA driver found")
POOL = {"kv_capacity_tokens": 8192}
CARD = {**POOL, "device": "cuda", "num_gpus": 1}
DRAFT = ModelFacts(max_positions=1024, num_weights=1_000_000, kv_numbers_per_token=100)


def values(speculative: Any, *, layout: str = "split", pool: dict[str, Any] = POOL) -> dict[str, Any]:
    pools = {"prefill": dict(pool), "decode": dict(pool)} if layout == "split" else {"decode": dict(pool)}
    return {"layout": layout, "pools": pools, "speculative": speculative}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": (values({"method": "medusa"}), 'speculative.method: "medusa"'),
    "a misspelt one": (values({"method": "ngrams"}), 'speculative.method: "ngrams"'),
    "a misspelt key": (values({"metod": "ngram"}), 'did you mean "method"?'),
    "another name of the section": ({**values({}), "speculation": {}}, 'did you mean "speculative"?'),
    "no such number": (values({"method": "ngram", "max_drafts": 5}), "speculative.max_drafts: 5"),
    "a text for a number": (values({"ngram_max": "4"}), 'speculative.ngram_max: "4" is text'),
    "n-grams of nothing": (values({"ngram_min": 0}), "speculative.ngram_min: 0"),
    "the shortest above the longest": (
        values({"method": "ngram", "ngram_min": 5}),
        "speculative.ngram_min: 5 is more than speculative.ngram_max, 4; expected at most that",
    ),
    "no small model": (
        values({"method": "draft_model"}),
        "speculative.model: missing; method draft_model needs the small",
    ),
    "no head": (values({"method": "eagle3"}), "speculative.model: missing; method eagle3 needs the head"),
    "a model for nothing": (values({"method": "ngram", "model": "./m"}), "is of no use with method ngram"),
    "a GGUF": (values({"method": "draft_model", "model": "m.gguf"}), 'speculative.model: "m.gguf" can\'t draft'),
    "the bundled one": (values({"method": "draft_model", "model": "bundled"}), "can't draft"),
    "a head in a lane": (
        values({"method": "eagle3", "model": "o/h"}, layout="two_lanes"),
        "speculative.method: eagle3 needs prompts and answers in the same lane",
    ),
    "grammars on a card": (values({"method": "grammar"}, pool=CARD), "speculative.method: grammar is for CPUs so far"),
    "a model for grammars": (values({"method": "grammar", "model": "./m"}), "is of no use with method grammar"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_wrong_thing_is_one_clear_line(name: str) -> None:
    of, words = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        config_of(of)
    assert len(refused.value.lines) == 1
    assert words in str(refused.value)


def test_what_may_be_said() -> None:
    assert config_of(values({})).speculative == SpeculativeConfig()
    assert config_of(values({"method": "ngram"}, pool=CARD)).speculative.method == "ngram"
    for method in ("draft_model", "eagle3"):
        on_cards = config_of(values({"method": method, "model": "org/model"}, pool=CARD))
        assert on_cards.speculative.drafts_by_model
    for count in DRAFT_COUNTS:
        assert config_of(values({"max_drafts": count})).speculative.max_drafts == count
    assert config_of(values({"method": "eagle3", "model": "org/head"})).speculative.model == "org/head"


def test_a_folder_counts_from_the_file_and_must_be_there(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(values({"method": "draft_model", "model": "./small"})))
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(file)
    (tmp_path / "small").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_config(file)
    (tmp_path / "small" / "config.json").write_text("{}")
    assert load_config(file).speculative.model == str(tmp_path / "small")


def test_replicas_are_told() -> None:
    given = {"method": "ngram", "max_drafts": 4, "ngram_min": 3, "ngram_max": 5}
    config = config_of(values(given))
    pools = config.pools.deployed()
    for name in ("prefill", "decode"):
        told = engine_settings(name, pools[name], config).speculative
        assert told == SpeculationSettings("ngram", None, 4, 3, 5)
    by_default = config_of(values({}))
    assert engine_settings("decode", by_default.pools.decode, by_default).speculative == SpeculationSettings()


# -- what a start looks at ---------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 8,
    "max_position_embeddings": 512,
}  # fmt: skip


def checkpoint(folder: Path, vocabulary: dict[str, int], config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": [{"content": "<eos>", "id": 7}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file({"w": torch.zeros(10)}, folder / "model.safetensors")
    return folder


def facts_of(model: Path, served: Path, method: str = "draft_model") -> DraftFacts | None:
    speculative = SpeculativeConfig.model_validate({"method": method, "model": str(model)})
    return draft_facts(speculative, ModelConfig(source=str(served)))


def test_a_model_of_the_same_tokens(tmp_path: Path) -> None:
    same = {"a": 0, "b": 1}
    small, served = (checkpoint(tmp_path / name, same, LLAMA) for name in ("small", "served"))
    facts = facts_of(small, served)
    assert facts is not None
    assert (facts.unlike, facts.hub) == ("", None)
    assert (facts.facts.num_weights, facts.facts.kv_numbers_per_token) == (10, 2 * 2 * 2 * 16)
    assert draft_facts(SpeculativeConfig(method="ngram"), ModelConfig(source=str(served))) is None


def test_a_model_of_other_tokens_is_refused(tmp_path: Path) -> None:
    small = checkpoint(tmp_path / "small", {"a": 0, "c": 1, "d": 2}, LLAMA)
    served = checkpoint(tmp_path / "served", {"a": 0, "b": 1, "c": 2}, LLAMA)
    facts = facts_of(small, served)
    assert facts is not None
    config = config_of(values({"method": "draft_model", "model": str(small)}))
    (error,) = [found for found in model_findings(config, LAPTOP, BUNDLED_FACTS, facts) if found.is_error]
    assert error.text == (
        f"speculative.model: {small} has other tokens than SmolLM2-135M-Instruct: 'b' is no token and not 1, 'c' is 1 "
        "and not 2, 'd' is 2 and not no token; choose a model of the same family, or set method: ngram"
    )


def test_the_bundled_model_as_the_served_one(tmp_path: Path) -> None:
    """Its tokens are in a GGUF, which may have more."""
    like = checkpoint(tmp_path / "like", {"<|im_start|>": 1, "<|im_end|>": 2, "unheard of": 3}, LLAMA)
    unlike = checkpoint(tmp_path / "unlike", {"<|im_start|>": 2, "<|im_end|>": 1}, LLAMA)
    found = [
        draft_facts(SpeculativeConfig(method="draft_model", model=str(folder)), ModelConfig())
        for folder in (like, unlike)
    ]
    assert [facts.unlike for facts in found if facts is not None] == [
        "",
        "'<|im_end|>' is 1 and not 2, '<|im_start|>' is 2 and not 1",
    ]


FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NESTED = {"speculators_model_type": "eagle3", "transformer_layer_config": {"num_key_value_heads": 2, "head_dim": 16}}


@pytest.mark.parametrize("config", [FLAT, NESTED], ids=["EAGLE", "speculators"])
def test_a_head(tmp_path: Path, config: dict[str, Any]) -> None:
    head = checkpoint(tmp_path / "head", {}, config)
    facts = facts_of(head, checkpoint(tmp_path / "served", {}, LLAMA), "eagle3")
    assert facts == DraftFacts(ModelFacts(num_weights=10, kv_numbers_per_token=2 * 2 * 16))


@pytest.mark.parametrize(
    ("method", "config", "words"),
    [
        ("eagle3", LLAMA, "is no EAGLE-3 head"),
        ("draft_model", {**LLAMA, "model_type": "never-heard-of"}, "does not know model_type"),
        ("draft_model", {}, "has no model_type"),
    ],
)
def test_what_is_none_is_refused(tmp_path: Path, method: str, config: dict[str, Any], words: str) -> None:
    model = checkpoint(tmp_path / "model", {}, config)
    with pytest.raises(ConfigError, match=r"^speculative\.model: ") as refused:
        facts_of(model, checkpoint(tmp_path / "served", {}, LLAMA), method)
    assert words in str(refused.value)


def drafting(method: str) -> Config:
    return config_of(values({"method": method, "model": "o/m"}))


def test_its_reach_is_a_warning() -> None:
    found = list(model_findings(drafting("draft_model"), LAPTOP, BUNDLED_FACTS, DraftFacts(DRAFT)))
    assert [(one.text, one.is_error) for one in found] == [
        (
            "speculative.model: o/m reaches 1024 tokens, model.max_model_len is 2048: beyond them nothing is drafted",
            False,
        )
    ]
    assert not list(model_findings(drafting("eagle3"), LAPTOP, BUNDLED_FACTS, DraftFacts(DRAFT)))


def test_its_memory() -> None:
    """A draft model has its KV where answers are decoded; a head has it in every block."""
    lines = [
        describe_memory(drafting(of), LAPTOP, BUNDLED_FACTS, DraftFacts(DRAFT)) for of in ("draft_model", "eagle3")
    ]
    assert "+ draft model 4 MB, its KV cache 3 MB; " in lines[0]
    assert "+ head 8 MB, its KV cache 7 MB; " in lines[1]
    large = DraftFacts(ModelFacts(num_weights=6 * GB, kv_numbers_per_token=100))
    (error,) = [
        found for found in model_findings(drafting("draft_model"), LAPTOP, BUNDLED_FACTS, large) if found.is_error
    ]
    assert "+ drafts 24.0 GB = " in error.text


def test_bytes_of_kv_are_for_both() -> None:
    """Of kv_memory_bytes the draft's KV is a part, and a request must fit with it."""
    draft = DraftFacts(ModelFacts(num_weights=10, kv_numbers_per_token=100))
    needed = 2048 * 4 * (30 * 2 * 3 * 64 + 100)
    given = values({"method": "draft_model", "model": "o/m"})
    given["pools"]["decode"] = {"kv_memory_bytes": needed - 1}
    (error,) = model_findings(config_of(given), LAPTOP, BUNDLED_FACTS, draft)
    assert error.text.startswith(f"pools.decode.kv_memory_bytes: {needed - 1} bytes cannot hold one request")
    assert f"expected at least {needed}" in error.text
    given["pools"]["decode"] = {"kv_memory_bytes": needed}
    assert not list(model_findings(config_of(given), LAPTOP, BUNDLED_FACTS, draft))
