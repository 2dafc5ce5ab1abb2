"""Linear layers of weights of 8 bits on a card: kernels of ours for few rows, the library's for more; CUDA only.

The same products as those of `QuantisedLinear`, whatever the number of rows: rounded inputs are rounded by the same
kernel for few and for many.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from replicas.cuda.operators import operator
from replicas.cuda.quantised_tiles import program_bytes, scaled_tile
from replicas.kernels.round_rows import round_rows
from replicas.kernels.scaled_product import scaled_product
from replicas.layers.packed_weights import FP8, PackedWeights, by_input, dequantised
from replicas.layers.quantised_linear import QuantisedLinear
from replicas.layers.rounding import round_by
from replicas.quantisation.scheme import Activations, Scheme

_SOME = 64  # rows
_BLOCK_N = 64
_FEWEST_OF_LIBRARY = 17  # rows of its product of int8
_LIBRARY_MULTIPLE = 16  # of inputs and outputs of its 8-bit products


def quantised_product(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, input_scale: torch.Tensor | None,
    bias: torch.Tensor | None, arrived: torch.Tensor, group_size: int, input_group: int,
) -> torch.Tensor:  # fmt: skip
    """x [R, K] of 16 bits, weights of 8 as in `PackedWeights`, bias [N] -> [R, N]. input_group: inputs that are rounded
    by one number; 0: none are. arrived as in `skinny_product`.

    An operator of its own so that a compiled layer is the same for all numbers of rows.
    """
    weights = PackedWeights(values, scales, group_size, input_scale=input_scale)
    num_out, num_in = weights.num_outputs, weights.num_inputs
    is_few = 0 < len(x) <= _SOME
    if not input_group:
        return F.linear(x, dequantised(weights, x.dtype), bias)
    if not len(x):
        return x.new_empty(0, num_out)
    if input_scale is not None:
        rounded, of_rows = round_by(x, input_scale, values.dtype), input_scale.view(1, 1)
    else:
        rounded, of_rows = round_rows(x.contiguous(), values.dtype, input_group)
    if is_few:
        tile = scaled_tile(len(x), num_out, num_in, program_bytes(x.device))
        return scaled_product(rounded, of_rows, values, scales, group_size, bias, tile, arrived, x.dtype)
    return _of_many_rows(rounded, of_rows, weights, bias, x.dtype)


def _of_many_rows(
    rounded: torch.Tensor, of_rows: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """rounded [R, K], of_rows [R or 1, groups or 1] -> [R, N]."""
    values, scales = weights.values, weights.scales
    is_whole = scales.shape[1] == 1 and of_rows.shape[1] == 1
    fits = values.shape[0] % _LIBRARY_MULTIPLE == 0 and values.shape[1] % _LIBRARY_MULTIPLE == 0
    if is_whole and fits and values.dtype is FP8 and dtype is torch.bfloat16:
        of_each = of_rows.expand(len(rounded), 1).contiguous()
        out = torch._scaled_mm(rounded, values.t(), of_each, scales.t().contiguous(), bias=bias, out_dtype=dtype)
    elif is_whole and fits and values.dtype is torch.int8 and len(rounded) >= _FEWEST_OF_LIBRARY:
        total = torch._int_mm(rounded, values.t()).float() * scales.t() * of_rows
        out = (total if bias is None else total + bias).to(dtype)
    else:
        numbers = (rounded.float() * by_input(of_rows, weights.group_size, weights.num_inputs)).to(dtype)
        out = F.linear(numbers, dequantised(weights, dtype), bias)
    return out


def _shape_of_product(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, input_scale: torch.Tensor | None,
    bias: torch.Tensor | None, arrived: torch.Tensor, group_size: int, input_group: int,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], values.shape[0])


_quantised_product = operator(quantised_product, _shape_of_product)


class QuantisedCardLinear(QuantisedLinear):
    """A linear layer of weights of 8 bits, also of joined projections, of 16-bit activations."""

    def __init__(self, weights: PackedWeights, bias: nn.Parameter | None, scheme: Scheme) -> None:
        super().__init__(weights, bias, scheme)
        arrived = torch.zeros(-(-weights.num_outputs // _BLOCK_N), dtype=torch.int32, device=weights.values.device)
        self.register_buffer("arrived", arrived, persistent=False)
        is_grouped = scheme.activations is Activations.TOKEN_GROUP
        self._input_group = self.group_size if is_grouped else weights.num_inputs
        if scheme.activations is Activations.NONE:
            self._input_group = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.as_weights_have_them(x.flatten(0, -2))
        out: torch.Tensor = _quantised_product(
            rows, self.values, self.scales, self.input_scale, self.bias, self.arrived, self.group_size,
            self._input_group,
        )  # fmt: skip
        return out.view(*x.shape[:-1], self.out_features)


def quantised_card_linear(layer: QuantisedLinear) -> QuantisedCardLinear | None:
    """Its tensors shared. None for one that stands here already."""
    return (
        None if isinstance(layer, QuantisedCardLinear) else QuantisedCardLinear(layer.weights, layer.bias, layer.scheme)
    )
