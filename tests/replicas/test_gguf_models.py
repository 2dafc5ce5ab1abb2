"""A GGUF of a model gives that model's text: by transformers from the converted folder, and by our engine.

The reference is transformers' own greedy generate of the model that the file was written from.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from transformers import AutoModelForCausalLM, GenerationConfig

from cluster.text.tokenizer import Tokenizer
from replicas.gguf.conversion import convert
from replicas.settings import ModelSettings
from tests.engines.local_system import LocalSystem, settings
from tests.replicas.tiny_gguf import (
    END,
    END_OF_TURN,
    PAD,
    VOCAB_SIZE,
    TinyGguf,
    gguf_of,
    llama3_factors,
    tiny_model,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
NUM_TOKENS = 6
# Random models soon repeat themselves: many prompts tell more than a long text.
PROMPTS = [[random.Random(number).randrange(END) for _ in range(30 + 15 * number)] for number in range(10)]


def texts(model: Any) -> list[list[int]]:
    """transformers' greedy continuation of each prompt."""
    config = GenerationConfig(pad_token_id=0, do_sample=False, max_new_tokens=NUM_TOKENS)
    return [model.generate(torch.tensor([ids]), generation_config=config)[0, len(ids) :].tolist() for ids in PROMPTS]


def converted(gguf: TinyGguf, tmp_path: Path) -> Path:
    return convert(gguf.write(tmp_path / "model.gguf"), tmp_path / "cache")


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def engine_texts(source: Path) -> list[list[int]]:
    model = ModelSettings(str(source), str(source.parent / "cache"), "float32", 512, "auto", trust_remote_code=False)
    system = LocalSystem(settings("decode", model=model), None)
    try:
        return [result.token_ids[0] for result in system.run([system.generation(ids, NUM_TOKENS) for ids in PROMPTS])]
    finally:
        system.close()


MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "LlamaConfig", {}, {}),
    "llama whose heads all have keys": ("llama", "LlamaConfig", {"num_key_value_heads": 4}, {}),
    "llama with longer heads": ("llama", "LlamaConfig", {"head_dim": 32}, {}),
    "llama with biases": ("llama", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama with tied embeddings": ("llama", "LlamaConfig", {"tie_word_embeddings": True}, {}),
    "llama with another base": ("llama", "LlamaConfig", {"rope_parameters": {"rope_theta": 500.0}}, {}),
    "linear": ("llama", "LlamaConfig", {"rope_parameters": LINEAR}, {"type": "linear", "factor": 4.0}),
    "yarn": (
        "qwen2",
        "Qwen2Config",
        {"rope_parameters": YARN},
        {"type": "yarn", "factor": 4.0, "original_context_length": 64, "finetuned": True},
    ),
    "yarn with its own range": (
        "llama",
        "LlamaConfig",
        {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}},
        {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
    ),
    "yarn from the context length": (
        "llama",
        "LlamaConfig",
        {"rope_parameters": YARN | {"original_max_position_embeddings": 512}},
        {"type": "yarn", "factor": 4.0, "attn_factor": 1.0},
    ),
    "qwen2": ("qwen2", "Qwen2Config", {}, {}),
    "qwen3": ("qwen3", "Qwen3Config", {"head_dim": 32}, {}),
    "phi3": ("phi3", "Phi3Config", {}, {}),
    "phi3, heads rotated in part": (
        "phi3",
        "Phi3Config",
        {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 8},
    ),
    "starcoder2": ("starcoder2", "Starcoder2Config", {"rope_parameters": {"rope_theta": 900.0}}, {}),
    "gpt2": ("gpt2", "GPT2Config", {}, {}),
    "qwen2moe": (
        "qwen2moe",
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        {},
    ),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        {"expert_weights_norm": True},
    ),
}


# Other ways to say what those above say, or nothing.
SPELLINGS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "linear by default": ("llama", "LlamaConfig", {"rope_parameters": LINEAR}, {"factor": 4.0}),
    "linear, old name": ("llama", "LlamaConfig", {"rope_parameters": LINEAR}, {"rope.scale_linear": 4.0}),
    "scaling by none": ("llama", "LlamaConfig", {}, {"type": "none", "factor": 4.0}),
    "yarn by one": ("llama", "LlamaConfig", {}, {"type": "yarn", "factor": 1.0, "original_context_length": 64}),
    "phi3, a window longer than any text": ("phi3", "Phi3Config", {}, {"attention.sliding_window": 512}),
}


def gguf_and_texts(row: tuple[str, str, dict[str, Any], dict[str, Any]]) -> tuple[TinyGguf, list[list[int]]]:
    """What is written of a model, and its texts. They must be able to tell: another config's are others."""
    architecture, config_class, changes, further = row
    model = tiny_model(config_class, **changes)
    expected = texts(model)
    assert len({token for text in expected for token in text}) >= 8
    if changes.get("rope_parameters"):
        assert texts(tiny_model(config_class, **changes | {"rope_parameters": None})) != expected
    names = {key: key if "." in key or "expert" in key else f"rope.scaling.{key}" for key in further}
    return gguf_of(model, architecture, **{names[key]: value for key, value in further.items()}), expected


@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_the_models(name: str, tmp_path: Path) -> None:
    gguf, expected = gguf_and_texts(MODELS[name])
    assert texts(loaded(converted(gguf, tmp_path))) == expected
    assert engine_texts(tmp_path / "model.gguf") == expected


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings(name: str, tmp_path: Path) -> None:
    gguf, expected = gguf_and_texts(SPELLINGS[name])
    assert texts(loaded(converted(gguf, tmp_path))) == expected


def test_a_file_without_an_output_matrix_uses_its_embeddings(tmp_path: Path) -> None:
    """As llama.cpp does; and a file may have both although they are the same."""
    untied, tied = tiny_model(), tiny_model(tie_word_embeddings=True)
    tied.load_state_dict({k: v for k, v in untied.state_dict().items() if k != "lm_head.weight"}, strict=False)
    tied.tie_weights()
    assert texts(tied) != texts(untied)
    gguf = gguf_of(untied, "llama")
    del gguf.tensors["output.weight"]
    assert texts(loaded(converted(gguf, tmp_path / "without"))) == texts(tied)
    gguf.tensors["output.weight"] = gguf.tensors["token_embd.weight"]
    assert texts(loaded(converted(gguf, tmp_path / "with"))) == texts(tied)


@pytest.mark.parametrize(
    "parameters", [LLAMA3, LLAMA3 | {"factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 6.0}]
)
def test_factors_of_llama_3_1(parameters: dict[str, Any], tmp_path: Path) -> None:
    """Short contexts, so that the factors show at once; recovered from nothing but themselves."""
    model = tiny_model(head_dim=32, rope_parameters=parameters)
    expected = texts(model)
    assert texts(tiny_model(head_dim=32)) != expected
    gguf = gguf_of(model, "llama")
    gguf.tensors["rope_freqs.weight"] = llama3_factors(parameters, 32)
    folder = converted(gguf, tmp_path)
    assert loaded(folder).config.rope_parameters["rope_type"] == "llama3"
    assert texts(loaded(folder)) == expected
    assert engine_texts(tmp_path / "model.gguf") == expected


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64), (32.0, 128)])
def test_metas_own_parameters_are_recovered(factor: float, head_dim: int, tmp_path: Path) -> None:
    """Llama 3.1 8B, 3.2 1B, 3.2 3B."""
    meta = LLAMA3 | {"rope_theta": 500_000.0, "factor": factor, "original_max_position_embeddings": 8_192}
    model = tiny_model(head_dim=head_dim, rope_parameters=meta)
    gguf = gguf_of(model, "llama")
    gguf.tensors["rope_freqs.weight"] = llama3_factors(meta, head_dim)
    assert loaded(converted(gguf, tmp_path)).config.rope_parameters == meta


def test_factors_of_one_change_nothing(tmp_path: Path) -> None:
    model = tiny_model()
    gguf = gguf_of(model, "llama")
    for name in ("rope_freqs", "rope_factors_long", "rope_factors_short"):
        gguf.tensors[f"{name}.weight"] = np.ones(8, dtype=np.float32)
    folder = converted(gguf, tmp_path)
    assert loaded(folder).config.rope_parameters["rope_type"] == "default"
    assert texts(loaded(folder)) == texts(model)


def test_quantised_tensors(tmp_path: Path) -> None:
    """The text of the same model with its weights rounded to Q8_0."""
    model = tiny_model(head_dim=32, rope_parameters=LLAMA3)
    gguf = gguf_of(model, "llama")
    gguf.tensors["rope_freqs.weight"] = llama3_factors(LLAMA3, 32)
    gguf.tensor_type = GGMLQuantizationType.Q8_0
    rounded = quants.quantize(model.model.layers[0].mlp.up_proj.weight.numpy(), gguf.tensor_type)
    for weight in model.parameters():
        if weight.ndim > 1:
            packed = quants.quantize(weight.numpy(), gguf.tensor_type)
            weight.copy_(torch.from_numpy(quants.dequantize(packed, gguf.tensor_type)))
    assert (quants.quantize(model.model.layers[0].mlp.up_proj.weight.numpy(), gguf.tensor_type) == rounded).all()
    expected = texts(model)
    assert texts(loaded(converted(gguf, tmp_path))) == expected
    assert engine_texts(tmp_path / "model.gguf") == expected


def test_a_mistral_is_a_llama(tmp_path: Path) -> None:
    """transformers takes a file of this name for a Mistral with its default sliding window."""
    model = tiny_model()
    gguf = gguf_of(model, "llama")
    gguf.metadata["general.name"] = "mistral"
    folder = converted(gguf, tmp_path)
    assert texts(loaded(folder)) == texts(model)
    assert engine_texts(tmp_path / "model.gguf") == texts(model)


def test_ends_of_text_are_what_the_file_says(tmp_path: Path) -> None:
    """Both of them: a chat model's answer ends with its turn. A config's defaults would be other tokens."""
    gguf = gguf_of(tiny_model(), "llama")
    assert Tokenizer(str(converted(gguf, tmp_path / "none"))).eos_token_ids == frozenset()
    gguf.metadata = {
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.eot_token_id": END_OF_TURN,
        "tokenizer.ggml.padding_token_id": PAD,
    }
    folder = converted(gguf, tmp_path / "both")
    assert Tokenizer(str(folder)).eos_token_ids == {END, END_OF_TURN}
    assert loaded(folder).generation_config.eos_token_id == [END, END_OF_TURN]
    assert Tokenizer(str(folder)).vocab_size == VOCAB_SIZE
