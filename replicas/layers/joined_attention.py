"""Attention modules that hand their joined projection to one function: norms, rotary positions, pool and attention.

Otherwise what lies between projections and attention is what transformers' code says. That stays the way of every
module that is not known here to the letter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from replicas.layers.joined_linear import ProjectionPart

# Of transformers: their forward passes are the same but for the norms, and for a sliding window, with which they are
# left alone.
_KNOWN = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")


class JoinedAttention(nn.Module):
    """Stands where a model has an attention that `is_known`, with the same parts under the same names.

    A device says in a subclass how it attends.
    """

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.layer_idx: int = attention.layer_idx  # type: ignore[assignment]
        self.is_causal = True
        self.scaling: float = attention.scaling  # type: ignore[assignment]
        for name, part in attention.named_children():
            self.add_module(name, part)

    def attend(self, projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, paged: Any) -> torch.Tensor:
        """projected [T, (num_heads + 2 * num_kv_heads) * head_dim]: q, k and v as `q_proj.joined` gives them; cos, sin
        [T, head_dim]; paged: what the model is called with -> [T, num_heads * head_dim]. Writes k and v to the pool.
        """
        raise NotImplementedError

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, *, paged: Any, **others: Any
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, hidden_size], position_embeddings: cos and sin [1, T, head_dim] -> the first's shape.

        others: what transformers hands to attention beside these, of which the known ones use nothing.
        """
        module: Any = self
        cos, sin = position_embeddings
        out = self.attend(module.q_proj.joined.product(hidden_states)[0], cos[0], sin[0], paged)
        return module.o_proj(out[None]), None


def is_known(module: nn.Module) -> bool:
    """Whether the module computes what a JoinedAttention does."""
    kind, made_of = type(module), [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    if kind.__name__ not in _KNOWN or not kind.__module__.startswith("transformers.models."):
        return False
    if not all(isinstance(part, ProjectionPart) for part in made_of):
        return False
    config: Any = getattr(module, "config", None)
    has_window = any(getattr(owner, "sliding_window", None) is not None for owner in (module, config))
    return not has_window and (getattr(module, "q_norm", None) is None) == (getattr(module, "k_norm", None) is None)
