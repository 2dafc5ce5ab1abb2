"""Small GGUF files of random transformers models, written as llama.cpp's convert_hf_to_gguf.py writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from transformers.convert_slow_tokenizer import bytes_to_unicode

_WORDS = ("th", "he", "an", "<|endoftext|>", "<|im_end|>", "<pad>")
END, END_OF_TURN, PAD = 259, 260, 261
VOCAB_SIZE = 262
_CONTROL = 3

# Bytes and a few words; nothing begins or ends a text.
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*bytes_to_unicode().values(), *_WORDS],
    "tokenizer.ggml.token_type": [1] * END + [_CONTROL] * (VOCAB_SIZE - END),
    "tokenizer.ggml.merges": ["t h", "h e", "a n"],
}

TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

# What llama.cpp's name of a setting is in transformers.
_SETTINGS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "norm_epsilon",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")


@dataclass
class TinyGguf:
    """What is written, for a test to change first. settings: without the architecture in front; None leaves one out.
    metadata: whole keys, also such as TOKENIZER has. tensors: in torch's shapes.
    """

    architecture: str
    settings: dict[str, Any]
    tensors: dict[str, np.ndarray[Any, Any]]
    metadata: dict[str, Any] = field(default_factory=dict)
    tensor_type: GGMLQuantizationType = GGMLQuantizationType.F32

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = GGUFWriter(path, self.architecture)
        for key, value in self.settings.items():
            if value is not None:
                _add(writer, f"{self.architecture}.{key}", value)
        own = {"tokenizer.ggml.pre": "qwen2"} if self.architecture == "qwen2" else {}
        for key, value in (TOKENIZER | own | self.metadata).items():
            if value is not None:
                _add(writer, key, value)
        for name, values in self.tensors.items():
            if values.ndim > 1 and self.tensor_type is not GGMLQuantizationType.F32:
                packed = quants.quantize(values, self.tensor_type)
                writer.add_tensor(name, packed, raw_dtype=self.tensor_type)
            else:
                writer.add_tensor(name, np.ascontiguousarray(values))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def tiny_model(config_class: str = "LlamaConfig", seed: int = 0, **changes: Any) -> Any:
    """A model in eval mode that ends nowhere. No two tensors are alike, and its layers outweigh its embeddings."""
    torch.manual_seed(seed)
    values = {**TINY, **changes}
    if config_class == "GPT2Config":
        names = {"num_key_value_heads": None, "max_position_embeddings": "n_positions", "intermediate_size": "n_inner"}
        values = {names.get(name, name): value for name, value in values.items() if names.get(name, name)}
    config = getattr(transformers, config_class)(**values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:  # norms are one, biases zero
                weight += 0.3 * torch.randn_like(weight)
        model.get_input_embeddings().weight *= 0.2
    return model.requires_grad_(False)


def gguf_of(model: Any, architecture: str, **settings: Any) -> TinyGguf:
    """settings: with "__" for "."; further ones, or others."""
    config = model.config
    known = {key: getattr(config, name, None) for key, name in _SETTINGS.items()}
    if architecture == "gpt2":
        known |= {"attention.layer_norm_epsilon": config.layer_norm_epsilon, "feed_forward_length": config.n_inner}
    elif config.rope_parameters["rope_theta"] != 10_000:
        known["rope.freq_base"] = config.rope_parameters["rope_theta"]
    if getattr(config, "head_dim", None):
        known |= dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim)
    known |= {key.replace("__", "."): value for key, value in settings.items()}
    known = {key: value for key, value in known.items() if value is not None}
    return TinyGguf(architecture, known, _tensors(model, architecture))


def llama3_factors(parameters: Mapping[str, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's conversion computes them for rope_freqs.weight."""
    base, original = parameters["rope_theta"], parameters["original_max_position_embeddings"]
    low, high, factor = parameters["low_freq_factor"], parameters["high_freq_factor"], parameters["factor"]
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * base ** (index / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def _tensors(model: Any, architecture: str) -> dict[str, np.ndarray[Any, Any]]:
    config = model.config
    (kind,) = (kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.numpy()
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            tensors[f"blk.{layer}.ffn_gate_exps.weight"], tensors[f"blk.{layer}.ffn_up_exps.weight"] = np.split(
                values, 2, axis=1
            )
            continue
        stem, ending = (name, "weight") if name.endswith("_proj") else name.rsplit(".", 1)
        stored = f"{names.get_name(stem)}.{ending}"
        if architecture == "gpt2" and stored.endswith(_TRANSPOSED):
            values = values.T
        if architecture == "llama" and (".attn_q." in stored or ".attn_k." in stored):
            heads = config.num_attention_heads if ".attn_q." in stored else config.num_key_value_heads
            rows = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = rows.swapaxes(1, 2).reshape(values.shape)  # as in Meta's files
        tensors[stored] = values[0] if stored.endswith("ffn_gate_inp_shexp.weight") else values
    return tensors


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
