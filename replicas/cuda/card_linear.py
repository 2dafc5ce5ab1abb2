"""The card's linear layer for one of a model: by what its weights are."""

from __future__ import annotations

from torch import nn

from replicas.cuda.int4_card_linear import int4_card_linear
from replicas.cuda.quantised_card_linear import quantised_card_linear
from replicas.cuda.skinny_linear import skinny_linear
from replicas.layers.linear import LinearLayer
from replicas.layers.quantised_linear import QuantisedLinear
from replicas.quantisation.scheme import WeightKind


def card_linear(module: nn.Module) -> LinearLayer | None:
    """None for what stays as it is."""
    if not isinstance(module, QuantisedLinear):
        return skinny_linear(module)
    is_int4 = module.scheme.kind is WeightKind.INT4
    return int4_card_linear(module) if is_int4 else quantised_card_linear(module)
