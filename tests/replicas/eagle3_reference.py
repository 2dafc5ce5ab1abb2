"""An EAGLE-3 head in plain torch, by its publication, without a cache, and tiny ones in the two published forms.

Written from the architecture alone: nothing of `replicas.speculation` is used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]


def config_of(
    hidden_size: int, num_heads: int, num_kv_heads: int, vocab_size: int, draft_vocab_size: int
) -> dict[str, Any]:
    """As EAGLE's own config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
    }


def random_tensors(config: dict[str, Any], has_own_embeddings: bool = True) -> Tensors:
    """By EAGLE's own names."""
    generator = torch.Generator().manual_seed(7)
    width, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = width // config["num_attention_heads"]
    shapes = {
        "fc.weight": (width, 3 * width),
        "midlayer.self_attn.q_proj.weight": (config["num_attention_heads"] * head_dim, 2 * width),
        "midlayer.self_attn.k_proj.weight": (config["num_key_value_heads"] * head_dim, 2 * width),
        "midlayer.self_attn.v_proj.weight": (config["num_key_value_heads"] * head_dim, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, config["num_attention_heads"] * head_dim),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        "lm_head.weight": (config["draft_vocab_size"], width),
    }
    if has_own_embeddings:
        shapes["embed_tokens.weight"] = (config["vocab_size"], width)
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1.0 + 0.1 * torch.randn(width, generator=generator)
    ids = torch.randperm(config["vocab_size"], generator=generator)[: config["draft_vocab_size"]].sort().values
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def save_eagle(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    """As yuhuili/EAGLE3-* have it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin")


def save_speculators(folder: Path, config: dict[str, Any], tensors: Tensors, **said: Any) -> None:
    """As speculators have it. said: further keys of its config.json."""
    folder.mkdir(exist_ok=True)
    of_layer = {k: v for k, v in config.items() if k not in ("architectures", "draft_vocab_size")}
    text = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "transformer_layer_config": of_layer,
        **said,
    }
    (folder / "config.json").write_text(json.dumps(text))
    renamed = {name.replace("midlayer.", "layers.0."): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")


@dataclass(frozen=True, slots=True)
class Reference:
    """The head over a whole sequence of entries, each a hidden state and the token behind it."""

    config: dict[str, Any]
    tensors: Tensors
    has_normed_residual: bool = False
    is_fed_normed: bool = False

    def norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return scaled * self.tensors[name]

    def fused(self, states: Tensor) -> Tensor:
        return states @ self.tensors["fc.weight"].T

    def keys_values(self, hidden: Tensor, next_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Each [n, KV heads, head_dim], keys turned by their positions 0, 1, ..."""
        x = self._input(hidden, next_ids)
        keys = self._heads(x, "k_proj")
        return self._turned(keys), self._heads(x, "v_proj")

    def outputs(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """[n, hidden size]"""
        x = self._input(hidden, next_ids)
        query = self._turned(self._heads(x, "q_proj"))
        keys, values = self.keys_values(hidden, next_ids)
        shared = [head * keys.shape[1] // query.shape[1] for head in range(query.shape[1])]
        scores = torch.einsum("qhd,khd->hqk", query, keys[:, shared]) / query.shape[2] ** 0.5
        is_later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        shares = scores.masked_fill(is_later, -torch.inf).softmax(dim=2)
        attended = torch.einsum("hqk,khd->qhd", shares, values[:, shared]).flatten(1)
        residual = self.norm(hidden, "midlayer.hidden_norm.weight") if self.has_normed_residual else hidden
        hidden = residual + attended @ self.tensors["midlayer.self_attn.o_proj.weight"].T
        y = self.norm(hidden, "midlayer.post_attention_layernorm.weight")
        gate = y @ self.tensors["midlayer.mlp.gate_proj.weight"].T
        inner = gate * gate.sigmoid() * (y @ self.tensors["midlayer.mlp.up_proj.weight"].T)
        output = hidden + inner @ self.tensors["midlayer.mlp.down_proj.weight"].T
        return self.norm(output, "norm.weight") if self.is_fed_normed else output

    def token(self, output: Tensor) -> int:
        """Its likeliest, as the served model names it."""
        normed = output if self.is_fed_normed else self.norm(output, "norm.weight")
        best = int((self.tensors["lm_head.weight"] @ normed).argmax())
        return best + int(self.tensors["d2t"][best])

    def drafts(self, states: Tensor, ids: list[int], count: int) -> list[int]:
        """What may follow ids, greedy. states: of all of them but the last, [len(ids) - 1, 3 * hidden size]."""
        hidden, next_ids, found = self.fused(states), list(ids[1:]), list[int]()
        while True:
            output = self.outputs(hidden, torch.tensor(next_ids))[-1]
            found.append(self.token(output))
            if len(found) == count:
                return found
            hidden = torch.cat((hidden, output[None]))
            next_ids.append(found[-1])

    def _input(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        embedded = self.norm(self.tensors["embed_tokens.weight"][next_ids], "midlayer.input_layernorm.weight")
        return torch.cat((embedded, self.norm(hidden, "midlayer.hidden_norm.weight")), dim=1)

    def _heads(self, x: Tensor, name: str) -> Tensor:
        head_dim = self.config["hidden_size"] // self.config["num_attention_heads"]
        return (x @ self.tensors[f"midlayer.self_attn.{name}.weight"].T).view(len(x), -1, head_dim)

    def _turned(self, x: Tensor) -> Tensor:
        """Pairs of numbers (j, j + half) turned by position / theta ** (j / half)."""
        half = x.shape[2] // 2
        angles = torch.arange(len(x))[:, None] * self.config["rope_theta"] ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
