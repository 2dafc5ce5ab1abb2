"""Linear layers whose weights are of few bits: the product that a scheme of quantisation defines, in plain PyTorch.

Weights alone (int4 always): they are made numbers of the activations' type, then multiplied. With activations rounded
too: rounded values are multiplied and summed exactly or in float32, then scaled. Either is the same for every number
of rows; a device that does it faster does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from replicas.layers.linear import LinearLayer
from replicas.layers.packed_weights import PackedWeights, by_input, dequantised, joined
from replicas.layers.rounding import rotated, round_by, round_rows
from replicas.quantisation.scheme import Activations, Scheme

# Outputs at once on a CPU: weights in full are then a few megabytes.
_OUTPUTS_AT_ONCE = 512


class QuantisedLinear(LinearLayer):
    """scheme: how its weights were rounded, and its inputs are to be. rounds_inputs: False within `whole_inputs`."""

    bias: nn.Parameter | None
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    input_scale: torch.Tensor | None
    rotation: torch.Tensor | None
    rounds_inputs = True

    def __init__(self, weights: PackedWeights, bias: nn.Parameter | None, scheme: Scheme) -> None:
        """Shares the tensors."""
        super().__init__(weights.num_inputs, weights.num_outputs)
        self.scheme = scheme
        self.group_size = weights.group_size
        for name, tensor in weights.tensors().items():
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
        self.register_parameter("bias", bias)

    @property
    def weights(self) -> PackedWeights:
        return PackedWeights(
            self.values, self.scales, self.group_size, self.zeros, self.order, self.input_scale, self.rotation
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.as_weights_have_them(x.flatten(0, -2))
        if self.scheme.activations is Activations.NONE or not self.rounds_inputs:
            out = self._of_plain_rows(rows)
        else:
            out = self._of_rounded_rows(*self.round_inputs(rows), x.dtype)
        return out.view(*x.shape[:-1], self.out_features)

    def as_weights_have_them(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [R, K] in the order of the weights' inputs, or rotated as those are."""
        if self.order is not None:
            rows = rows[:, self.order]
        return rows if self.rotation is None else rotated(rows, self.rotation)

    def round_inputs(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounded values of rows [R, K], and their scales: [R, groups], or [1, 1] for all."""
        if self.input_scale is not None:
            return round_by(rows, self.input_scale, self.values.dtype), self.input_scale.view(1, 1)
        is_grouped = self.scheme.activations is Activations.TOKEN_GROUP
        return round_rows(rows, self.values.dtype, self.group_size if is_grouped else self.in_features)

    def _of_plain_rows(self, rows: torch.Tensor) -> torch.Tensor:
        products = [F.linear(rows, dequantised(part, rows.dtype)) for part in self._some_outputs()]
        out = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        return out if self.bias is None else out + self.bias

    def _of_rounded_rows(self, values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """float32 until the end."""
        if values.dtype is torch.int8 and values.device.type == "cpu":
            out = torch._int_mm(values.contiguous(), self.values.t()) * self.scales.t()
            out = out * scales
        else:
            # Of groups each has its own scale: rows are scaled before the sum. Else behind it, where less is rounded.
            is_grouped = scales.shape[1] > 1
            numbers = (
                values.float() * by_input(scales, self.group_size, self.in_features) if is_grouped else values.float()
            )
            products = [F.linear(numbers, dequantised(part, torch.float32)) for part in self._some_outputs()]
            out = products[0] if len(products) == 1 else torch.cat(products, dim=1)
            out = out if is_grouped else out * scales
        if self.bias is not None:
            out = out + self.bias
        return out.to(dtype)

    def _some_outputs(self) -> Iterator[PackedWeights]:
        """All weights, in parts on a CPU, where they are made numbers each time."""
        weights = self.weights
        if weights.values.device.type != "cpu":
            yield weights
            return
        for first in range(0, self.out_features, _OUTPUTS_AT_ONCE):
            rows = slice(first, first + _OUTPUTS_AT_ONCE)
            zeros = None if weights.zeros is None else weights.zeros[rows]
            yield PackedWeights(weights.values[rows], weights.scales[rows], self.group_size, zeros)

    def join(self, others: Sequence[Self]) -> Self | None:
        """Only layers of one scheme and equal inputs, order and scale of them included; all with a bias, or none."""
        parts = (self, *others)
        if len({(part.scheme, part.in_features, part.bias is None) for part in parts}) > 1:
            return None
        weights = joined([part.weights for part in parts])
        if weights is None:
            return None
        given = [part.bias.detach() for part in parts if part.bias is not None]
        bias = nn.Parameter(torch.cat(given), requires_grad=False) if given else None
        return type(self)(weights, bias, self.scheme)


@contextmanager
def whole_inputs(model: nn.Module) -> Iterator[None]:
    """Within it no layer of this class rounds its inputs: what rounding them changes can be seen. Mutates the model."""
    layers = [module for module in model.modules() if type(module) is QuantisedLinear]
    for layer in layers:
        layer.rounds_inputs = False
    try:
        yield
    finally:
        for layer in layers:
            layer.rounds_inputs = True
