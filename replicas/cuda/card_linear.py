"""The card's linear layer for one of a model: by what its weights are."""

from __future__ import annotations

from torch import nn

from replicas.cuda.quantised_card_linear import quantised_card_linear
from replicas.cuda.skinny_linear import skinny_linear
from replicas.layers.linear import LinearLayer
from replicas.layers.quantised_linear import QuantisedLinear


def card_linear(module: nn.Module) -> LinearLayer | None:
    """None for what stays as it is."""
    return quantised_card_linear(module) if isinstance(module, QuantisedLinear) else skinny_linear(module)
