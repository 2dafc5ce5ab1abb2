"""All that a card's runner puts into a model: its attention, its linear layers, its decoder layers."""

from __future__ import annotations

from torch import nn

from replicas.cuda.card_linear import card_linear
from replicas.cuda.gated_layer import gated_layer
from replicas.cuda.known_layer import KnownLayer
from replicas.cuda.rotated_attention import RotatedAttention
from replicas.cuda.rounded_layer import rounded_layer
from replicas.layers.replaced_layers import Replacement, with_card_kernels


def card_layers() -> tuple[Replacement, ...]:
    """After `before_serving`, and once attention has its pool."""
    return with_card_kernels(RotatedAttention, card_linear, card_layer)


def card_layer(module: nn.Module) -> KnownLayer | None:
    """The card's for a decoder layer, by what its linear layers are; None for what stays as it is."""
    return rounded_layer(module) or gated_layer(module)
