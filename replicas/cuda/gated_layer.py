"""A decoder layer whose MLP's gate, and the sum behind its MLP, are made by who makes the products: within those of few
rows; CUDA only.

Of weights of 16 bits and of 4, whose inputs are not rounded: else the compiler makes a kernel of either, of some
microseconds each, which in a decode step are mostly the way there. Norms and the sum behind attention stay the
compiler's, as in the layer for which this one stands, and so do the products' own roundings.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from replicas.cuda.int4_card_linear import Int4CardLinear
from replicas.cuda.known_layer import KnownLayer, linears_of
from replicas.cuda.skinny_linear import SkinnyLinear
from replicas.layers.further_products import FurtherProduct


class GatedLayer(KnownLayer):
    """One that `gated_layer` knows."""

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: Any, paged: Any, **others: Any
    ) -> torch.Tensor:
        """As RoundedLayer's."""
        module: Any = self
        attended, _ = module.self_attn(module.input_layernorm(hidden_states), position_embeddings, paged=paged)
        hidden = hidden_states + attended
        gates = self._gate_up.gated(module.post_attention_layernorm(hidden))
        return self._down.added(gates, hidden)

    def further_products(self) -> tuple[FurtherProduct, FurtherProduct]:
        gate_up, down = self._gate_up, self._down
        return (
            FurtherProduct("gate", gate_up, lambda x, onto: gate_up.gated(x), lambda product, onto: _gate_of(product)),
            FurtherProduct("sum", down, down.added, torch.add),
        )

    @property
    def _gate_up(self) -> SkinnyLinear | Int4CardLinear:
        mlp: Any = self.mlp
        linear: SkinnyLinear | Int4CardLinear = mlp.gate_proj.joined.linear
        return linear

    @property
    def _down(self) -> SkinnyLinear | Int4CardLinear:
        mlp: Any = self.mlp
        linear: SkinnyLinear | Int4CardLinear = mlp.down_proj
        return linear


def _gate_of(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.chunk(2, dim=-1)
    return F.silu(gate) * up


def gated_layer(module: nn.Module) -> GatedLayer | None:
    """With the parts of a decoder layer that is known to the letter, once these are the card's. None for any other."""
    linears = linears_of(module)
    if linears is None or not all(map(_is_gating, (linears.gate_up, linears.down))):
        return None
    return GatedLayer(module)


def _is_gating(linear: nn.Module | None) -> bool:
    return isinstance(linear, SkinnyLinear | Int4CardLinear)
