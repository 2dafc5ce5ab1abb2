"""Linear layers that say how their weights lie in memory, and how y = x W^T + b is computed from them.

A way to do it is a subclass of LinearLayer: what a device has for plain weights, or a kind of quantised ones. Whether a
layer may be replaced or joined is asked here, not of transformers' classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn


class LinearLayer(nn.Module):
    """Stands where a model has an `nn.Linear`: `forward` takes x [..., in_features] to [..., out_features]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

    def join(self, others: Sequence[Self]) -> LinearLayer | None:
        """One layer whose outputs are this one's, then each of the others', which are of this class.

        None when one product can't stand for all of them. Takes new memory for their weights, mutates nothing.
        """
        return None


class PlainLinear(LinearLayer):
    """Weights as numbers of one type, [out_features, in_features], and a bias or none; the library's product."""

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        """Shares the tensors."""
        super().__init__(weight.shape[1], weight.shape[0])
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def join(self, others: Sequence[Self]) -> Self | None:
        """Only layers of equal input, dtype and device, all with a bias or all without. On a CPU one input's weights
        lie side by side in memory."""
        parts = (self, *others)
        kinds = {(part.in_features, part.bias is None, part.weight.dtype, part.weight.device) for part in parts}
        if len(kinds) > 1:
            return None
        weight = torch.cat([part.weight.detach() for part in parts])
        if weight.device.type == "cpu":
            # One row times this reads memory in long runs. With more rows the order makes no difference.
            weight = weight.t().contiguous().t()
        given = [part.bias.detach() for part in parts if part.bias is not None]
        bias = nn.Parameter(torch.cat(given), requires_grad=False) if given else None
        return type(self)(nn.Parameter(weight, requires_grad=False), bias)


def linear_layer(module: object) -> LinearLayer | None:
    """The module, if it is one of ours; of a linear layer of transformers one of ours that shares its tensors.

    None for anything else: subclasses (quantised, adapters) and what has hooks compute something else.
    """
    if not isinstance(module, nn.Module) or module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) is nn.Linear:
        return PlainLinear(module.weight, module.bias)  # type: ignore[arg-type]
    return module if isinstance(module, LinearLayer) else None


def plain_linear(module: object) -> PlainLinear | None:
    """As `linear_layer`, where that is plain: a device may compute it in a way of its own."""
    layer = linear_layer(module)
    return layer if type(layer) is PlainLinear else None


def join_linear_layers(modules: Sequence[object]) -> LinearLayer | None:
    """One layer that computes what all of them do; None when they are not alike or can't be joined."""
    layers = [layer for layer in map(linear_layer, modules) if layer is not None]
    if len(layers) < len(modules) or len({type(layer) for layer in layers}) > 1:
        return None
    return layers[0].join(layers[1:])
