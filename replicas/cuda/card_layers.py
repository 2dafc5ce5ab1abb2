"""All that a card's runner puts into a model: its attention, its linear layers, its decoder layers."""

from __future__ import annotations

from replicas.cuda.card_linear import card_linear
from replicas.cuda.rotated_attention import RotatedAttention
from replicas.cuda.rounded_layer import rounded_layer
from replicas.layers.replaced_layers import Replacement, with_card_kernels


def card_layers() -> tuple[Replacement, ...]:
    """After `before_serving`, and once attention has its pool."""
    return with_card_kernels(RotatedAttention, card_linear, rounded_layer)
