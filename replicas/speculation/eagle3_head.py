"""An EAGLE-3 head: one layer that goes on from a model's hidden states, and says which token may come after the next.

For position i it is given what three layers of the model made of the tokens up to i, and the embedding of token i + 1;
its output stands for token i + 2. Drafting further, its own output takes the place of the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from replicas.model.attention import paged_attention
from replicas.speculation.eagle3_files import NUM_HIDDEN_STATES, Eagle3Config, Eagle3Files, refuse_unexplained


class Norm(nn.Module):
    """Root mean square, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        numbers = x.float()
        scaled = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * scaled.to(x.dtype)


class Attention(nn.Module):
    """Over a layer of the served model's blocks. Its inputs are twice as wide as its outputs."""

    is_causal = True

    def __init__(self, config: Eagle3Config, layer_idx: int, has_head_norms: bool) -> None:
        super().__init__()
        layer = config.layer
        self.layer_idx = layer_idx
        self.head_dim = layer.head_dim or layer.hidden_size // layer.num_attention_heads
        self.num_heads, self.num_kv_heads = layer.num_attention_heads, layer.num_key_value_heads
        width = 2 * layer.hidden_size
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, layer.hidden_size, bias=False)
        norms = [Norm(self.head_dim, layer.rms_norm_eps) if has_head_norms else nn.Identity() for _ in range(2)]
        self.q_norm, self.k_norm = norms
        self.attend: Callable[..., tuple[Tensor, None]] = paged_attention  # a card has another one

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], step: Any) -> Tensor:
        """x: [1, n, 2 * hidden]. Writes keys and values. [1, n, hidden]."""
        query, key, value = (
            part.unflatten(2, (-1, self.head_dim)) for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        query, key = self.q_norm(query).transpose(1, 2), self.k_norm(key).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *angles)
        attended, _ = self.attend(self, query, key, value.transpose(1, 2), None, paged=step)
        output: Tensor = self.o_proj(attended.flatten(2))
        return output


class Mlp(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    def __init__(self, config: Eagle3Config, layer_idx: int, has_head_norms: bool) -> None:
        super().__init__()
        layer = config.layer
        self._has_normed_residual = config.has_normed_residual
        self.self_attn = Attention(config, layer_idx, has_head_norms)
        self.mlp = Mlp(layer.hidden_size, layer.intermediate_size)
        self.input_layernorm = Norm(layer.hidden_size, layer.rms_norm_eps)
        self.hidden_norm = Norm(layer.hidden_size, layer.rms_norm_eps)
        self.post_attention_layernorm = Norm(layer.hidden_size, layer.rms_norm_eps)

    def forward(self, embedded: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor], step: Any) -> Tensor:
        normed = self.hidden_norm(hidden)
        hidden = normed if self._has_normed_residual else hidden
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        hidden = hidden + self.self_attn(x, angles, step)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3Head(nn.Module):
    """embed_tokens: its own, or the served model's. target_ids: int64 [draft vocabulary], of the served model."""

    target_ids: Tensor

    def __init__(self, config: Eagle3Config, layer_idx: int, target_ids: Tensor, has_head_norms: bool = False) -> None:
        """layer_idx: of its layer in a block of the served model's pool."""
        super().__init__()
        layer = config.layer
        self.config = config
        width = NUM_HIDDEN_STATES * config.served_hidden_size
        self.fc = nn.Linear(width, layer.hidden_size, bias=False)
        self.input_norm = Norm(width, layer.rms_norm_eps) if config.has_input_norm else None
        self.fc_norm: nn.ModuleList | None = None
        if config.has_state_norms:
            self.fc_norm = nn.ModuleList(
                Norm(config.served_hidden_size, layer.rms_norm_eps) for _ in range(NUM_HIDDEN_STATES)
            )
        self.layer = Layer(config, layer_idx, has_head_norms)
        self.norm = Norm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(layer.vocab_size, layer.hidden_size)
        self.rotary_emb = LlamaRotaryEmbedding(layer)
        self.register_buffer("target_ids", target_ids, persistent=False)

    @property
    def kv_shape(self) -> tuple[int, int]:
        """KV heads, and numbers of a head."""
        return self.layer.self_attn.num_kv_heads, self.layer.self_attn.head_dim

    def fused(self, states: Tensor) -> Tensor:
        """What the model made of some tokens, [n, 3 * its hidden size] -> [n, hidden size]."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(NUM_HIDDEN_STATES, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        output: Tensor = self.fc(states)
        return output

    def forward(self, hidden: Tensor, next_ids: Tensor, positions: Tensor, step: Any) -> Tensor:
        """hidden: [n, hidden size], `fused` or its own output, at positions, int64 [n]. next_ids: int64 [n], the tokens
        behind these. step: what its attention is given. Writes keys and values at the positions. Its output, [n, hidden
        size]."""
        embedded = self.embed_tokens(next_ids)[None].to(hidden.dtype)
        angles = self.rotary_emb(hidden[None], positions[None])
        output: Tensor = self.layer(embedded, hidden[None], angles, step)[0]
        if self.config.is_fed_normed:
            output = self.norm(output)
        return output

    def draft_logits(self, output: Tensor) -> Tensor:
        """[n, draft vocabulary], of the tokens that it drafts, in the order of target_ids."""
        normed = output if self.config.is_fed_normed else self.norm(output)
        known: Tensor = self.lm_head(normed)
        return known

    def logits(self, output: Tensor, vocab_size: int) -> Tensor:
        """float32 [n, vocab_size] of the served model's tokens: -inf of those that it never drafts."""
        known = self.draft_logits(output).float()
        logits = known.new_full((len(output), vocab_size), -torch.inf)
        logits[:, self.target_ids] = known
        return logits


def make_head(source: str, files: Eagle3Files, layer_idx: int, embeddings: nn.Module, dtype: torch.dtype) -> Eagle3Head:
    """With the tensors of its files, in eval mode. embeddings: the served model's, where it has none of its own.

    Raises CheckpointMismatch for tensors that its config does not explain, or of other shapes.
    """
    tensors: Mapping[str, Tensor] = files.tensors
    has_head_norms = "layer.self_attn.q_norm.weight" in tensors
    head = Eagle3Head(files.config, layer_idx, files.target_ids, has_head_norms)
    if "embed_tokens.weight" not in tensors:
        head.embed_tokens = embeddings  # type: ignore[assignment]
    wanted = {name: tensor for name, tensor in head.state_dict().items() if not _is_borrowed(name, tensors)}
    wrong = [name for name in wanted.keys() & tensors.keys() if wanted[name].shape != tensors[name].shape]
    refuse_unexplained(
        source, sorted((wanted.keys() - tensors.keys()) | set(wrong)), sorted(tensors.keys() - wanted.keys())
    )
    head.load_state_dict({name: tensors[name].to(dtype) for name in wanted}, strict=False, assign=True)
    return head.eval().requires_grad_(False)


def _is_borrowed(name: str, tensors: Mapping[str, Tensor]) -> bool:
    return name.startswith("embed_tokens.") and "embed_tokens.weight" not in tensors
