"""A decoder layer whose MLP's gate, and the sum behind its MLP, are made within the products; CUDA only.

Of weights of 16 bits and of 4, whose inputs are not rounded: else the compiler makes a kernel of either, of some
microseconds each, which in a decode step are mostly the way there. Norms and the sum behind attention stay the
compiler's, as in the layer for which this one stands, and so do the products' own roundings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from replicas.cuda.known_layer import KnownLayer, linears_of
from replicas.cuda.skinny_linear import SkinnyLinear


class GatedLayer(KnownLayer):
    """One that `gated_layer` knows."""

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: Any, paged: Any, **others: Any
    ) -> torch.Tensor:
        """As RoundedLayer's."""
        module: Any = self
        mlp = module.mlp
        attended, _ = module.self_attn(module.input_layernorm(hidden_states), position_embeddings, paged=paged)
        hidden = hidden_states + attended
        gates = mlp.gate_proj.joined.linear.gated(module.post_attention_layernorm(hidden))
        out: torch.Tensor = mlp.down_proj.added(gates, hidden)
        return out


def gated_layer(module: nn.Module) -> GatedLayer | None:
    """With the parts of a decoder layer that is known to the letter, once these are the card's. None for any other, and
    for an MLP with biases."""
    linears = linears_of(module)
    if linears is None or not all(map(_is_gating, (linears.gate_up, linears.down))):
        return None
    return GatedLayer(module)


def _is_gating(linear: nn.Module | None) -> bool:
    return isinstance(linear, SkinnyLinear) and linear.bias is None
