"""A decoder layer of 8-bit products whose rows are rounded by the kernels that make them; CUDA only.

Else each of its products begins with a kernel that rounds the rows: four of them in a layer, of as many microseconds as
the norms have in front of them. Here only what attention gives is rounded so. What is added behind attention is added
by the norm's kernel, what is added behind the MLP by that of the product, where rows are few. Numbers are rounded where
a layer that is compiled rounds them, and the same kernels compute few rows and many, products apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from replicas.cuda.known_layer import KnownLayer, linears_of
from replicas.cuda.operators import operator
from replicas.cuda.quantised_card_linear import QuantisedCardLinear
from replicas.kernels.round_normed import round_normed
from replicas.kernels.round_rows import MOST_AT_ONCE, round_rows
from replicas.layers.further_products import FurtherProduct


def rounded_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `round_normed`, of rows that lie anyhow."""
    return round_normed(x.contiguous(), None if added is None else added.contiguous(), weight, epsilon, dtype)


def _shape_of_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, num_in = x.shape
    total = x.new_empty(num_rows if added is not None else 0, num_in)
    return total, x.new_empty(num_rows, num_in, dtype=dtype), x.new_empty(num_rows, 1, dtype=torch.float32)


_rounded_norm = operator(rounded_norm, _shape_of_norm)


class RoundedLayer(KnownLayer):
    """One that `rounded_layer` knows."""

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: Any, paged: Any, **others: Any
    ) -> torch.Tensor:
        """hidden_states [1, T, hidden_size], position_embeddings: cos and sin [1, T, head_dim] -> the first's shape.

        others: what transformers hands to layers beside these, of which the known ones use nothing here.
        """
        module: Any = self
        attention, mlp = module.self_attn, module.mlp
        hidden, (cos, sin) = hidden_states[0], position_embeddings
        qkv: QuantisedCardLinear = attention.q_proj.joined.linear
        _, values, scales = _normed(module.input_layernorm, hidden, None, qkv)
        projected = qkv.of_rounded_rows(values, scales, hidden.dtype)
        attended = attention.o_proj(attention.attend(projected, cos[0], sin[0], paged))
        gate_up: QuantisedCardLinear = mlp.gate_proj.joined.linear
        hidden, values, scales = _normed(module.post_attention_layernorm, hidden, attended, gate_up)
        values, scales = gate_up.gate_of_rounded_rows(values, scales, hidden.dtype, mlp.down_proj.values.dtype)
        out: torch.Tensor = mlp.down_proj.of_rounded_rows(values, scales, hidden.dtype, onto=hidden)
        return out[None]

    def further_products(self) -> tuple[FurtherProduct]:
        """But for the gate, which is given rounded to 8 bits: by far more than a right product may differ."""
        module: Any = self
        down: QuantisedCardLinear = module.mlp.down_proj

        def added(x: torch.Tensor, onto: torch.Tensor) -> torch.Tensor:
            values, scales = round_rows(x, down.values.dtype, down.in_features)
            return down.of_rounded_rows(values, scales, x.dtype, onto=onto)

        return (FurtherProduct("sum", down, added, torch.add),)


def _normed(
    norm: Any, x: torch.Tensor, added: torch.Tensor | None, linear: QuantisedCardLinear
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `round_normed`, in the type of what this layer multiplies."""
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _rounded_norm(
        x, added, norm.weight, norm.variance_epsilon, linear.values.dtype
    )
    return found


def rounded_layer(module: nn.Module) -> RoundedLayer | None:
    """With the parts of a decoder layer that is known to the letter, once these are the card's. None for any other, and
    where a hook looks at something that there would be no more."""
    linears = linears_of(module)
    if linears is None:
        return None
    made_of = (linears.qkv, linears.gate_up, linears.down)
    return RoundedLayer(module) if all(map(_takes_rounded_rows, made_of)) else None


def _takes_rounded_rows(linear: nn.Module | None) -> bool:
    if not isinstance(linear, QuantisedCardLinear):
        return False
    return linear.takes_rounded_rows and linear.in_features <= MOST_AT_ONCE
