"""What an EAGLE head of a model computes for a draft, by the card's products, on weights of no meaning."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from replicas.cuda.quantised_card_linear import QuantisedCardLinear
from replicas.cuda.skinny_linear import SkinnyLinear
from replicas.layers.linear import LinearLayer
from replicas.layers.packed_weights import FP8, PackedWeights
from replicas.layers.rounding import round_rows
from replicas.quantisation.scheme import WeightKind
from replicas.quantisation.scheme_reading import scheme_made_here


class HeadProducts(nn.Module):
    """One layer of the model's, whose attention is given a token's embedding beside the hidden state, and a head of
    fewer tokens. What it attends to is a few drafts' and one sequence's keys: next to nothing, and left out."""

    def __init__(self, config: dict[str, Any], head_size: int, device: torch.device, *, is_fp8: bool) -> None:
        """config: the shape's. is_fp8: its weights, and their inputs, are rounded: a draft that is another for it costs
        time, never text."""
        super().__init__()
        dim, inner = config["hidden_size"], config["intermediate_size"]
        num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim") or dim // num_heads
        self.dim, self._width = dim, num_heads * head_dim

        def layer(num_out: int, num_in: int) -> LinearLayer:
            weight = torch.randn(num_out, num_in, dtype=torch.bfloat16, device=device) / num_in**0.5
            if not is_fp8:
                return SkinnyLinear(nn.Parameter(weight, requires_grad=False), None)
            values, scales = round_rows(weight, FP8, num_in)
            return QuantisedCardLinear(PackedWeights(values, scales, num_in), None, scheme_made_here(WeightKind.FP8))

        self._joined = layer((num_heads + 2 * num_kv_heads) * head_dim, 2 * dim)
        self._out = layer(dim, self._width)
        self._up, self._down, self._head = layer(2 * inner, dim), layer(dim, inner), layer(head_size, dim)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """[1, R, 2 * dim], an embedding beside a hidden state, to that of the next draft. Does not block."""
        hidden = self._out(self._joined(state)[..., : self._width])
        gate, up = self._up(hidden).chunk(2, -1)
        hidden = hidden + self._down(F.silu(gate) * up)
        self._head(hidden).argmax(-1)
        return torch.cat([hidden, hidden], -1)
