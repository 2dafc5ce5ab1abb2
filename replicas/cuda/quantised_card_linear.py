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
from replicas.kernels.parts_of_product import none_arrived
from replicas.kernels.round_gated import round_gated
from replicas.kernels.round_known import round_known
from replicas.kernels.round_rows import round_rows
from replicas.kernels.scaled_gemv import gated_gemv, is_single, scaled_gemv
from replicas.kernels.scaled_product import gated_product, is_gated_tile, scaled_product
from replicas.kernels.skinny_product import MOST_ROWS
from replicas.layers.packed_weights import FP8, PackedWeights, by_input, dequantised
from replicas.layers.quantised_linear import QuantisedLinear
from replicas.layers.rounding import round_by
from replicas.quantisation.scheme import Activations, Scheme

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
    if not input_group:
        return F.linear(x, dequantised(weights, x.dtype), bias)
    if not len(x):
        return x.new_empty(0, weights.num_outputs)
    if input_scale is not None:
        rounded, of_rows = round_by(x, input_scale, values.dtype), input_scale.view(1, 1)
    else:
        rounded, of_rows = round_rows(x.contiguous(), values.dtype, input_group)
    return rounded_product(rounded, of_rows, values, scales, bias, None, arrived, group_size, x.dtype)


def rounded_product(
    rounded: torch.Tensor, of_rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor,
    bias: torch.Tensor | None, onto: torch.Tensor | None, arrived: torch.Tensor, group_size: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """rounded [R, K] and their scales, weights and bias as in `quantised_product` -> [R, N] of this type. onto: [R, N],
    that the product, once it is of this type, is added to."""
    num_rows, (num_out, num_in) = len(rounded), values.shape
    if not num_rows:
        return rounded.new_empty(0, num_out, dtype=dtype)
    if is_single(rounded, of_rows, values, scales):
        return scaled_gemv(rounded, of_rows, values, scales, bias, dtype, None if onto is None else onto.contiguous())
    if num_rows <= MOST_ROWS:
        tile = scaled_tile(num_rows, num_out, num_in, program_bytes(rounded.device))
        given = None if onto is None else onto.contiguous()
        return scaled_product(rounded, of_rows, values, scales, group_size, bias, tile, arrived, dtype, given)
    out = _of_many_rows(rounded, of_rows, PackedWeights(values, scales, group_size), bias, dtype)
    return out if onto is None else out.add_(onto)


def rounded_gate(
    rounded: torch.Tensor, of_rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor,
    bias: torch.Tensor | None, arrived: torch.Tensor, group_size: int, dtype: torch.dtype, kind: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`round_gated` of the `rounded_product` of an MLP's gate and up, to this kind. With few rows the gate is made
    behind the product, so that many programs can round a row: they know its largest number."""
    if is_single(rounded, of_rows, values, scales):
        return round_known(*gated_gemv(rounded, of_rows, values, scales, bias, dtype), kind)
    if 0 < len(rounded) <= MOST_ROWS:
        tile = scaled_tile(len(rounded), values.shape[0], values.shape[1], program_bytes(rounded.device))
        if is_gated_tile(tile, scales):
            return round_known(*gated_product(rounded, of_rows, values, scales, bias, tile, dtype), kind)
    return round_gated(rounded_product(rounded, of_rows, values, scales, bias, None, arrived, group_size, dtype), kind)


def _of_many_rows(
    rounded: torch.Tensor, of_rows: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """rounded [R, K], of_rows [R or 1, groups or 1] -> [R, N]."""
    values, scales = weights.values, weights.scales
    is_whole = scales.shape[1] == 1 and of_rows.shape[1] == 1
    fits = values.shape[0] % _LIBRARY_MULTIPLE == 0 and values.shape[1] % _LIBRARY_MULTIPLE == 0
    if is_whole and fits and values.dtype is FP8 and dtype is torch.bfloat16:
        of_each = of_rows.expand(len(rounded), 1).contiguous()
        # Not `use_fast_accum`, which is 5 to 12 % faster: sums stay in 13 bits to their end. Of 14,336 products of one
        # sign a fifth is lost then, of 4,096 a fourteenth (here 0.0005, of few rows 0.002); of random ones it adds as
        # much as rounding to bfloat16 does, or twice that (H200). A text would depend on how many rows its steps had.
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


def _shape_of_rounded_product(
    rounded: torch.Tensor, of_rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor,
    bias: torch.Tensor | None, onto: torch.Tensor | None, arrived: torch.Tensor, group_size: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    return rounded.new_empty(rounded.shape[0], values.shape[0], dtype=dtype)


def _shape_of_gate(
    rounded: torch.Tensor, of_rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor,
    bias: torch.Tensor | None, arrived: torch.Tensor, group_size: int, dtype: torch.dtype, kind: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    num_rows = rounded.shape[0]
    return (
        rounded.new_empty(num_rows, values.shape[0] // 2, dtype=kind),
        rounded.new_empty(num_rows, 1, dtype=torch.float32),
    )


_quantised_product = operator(quantised_product, _shape_of_product)
_rounded_product = operator(rounded_product, _shape_of_rounded_product)
_rounded_gate = operator(rounded_gate, _shape_of_gate)


class QuantisedCardLinear(QuantisedLinear):
    """A linear layer of weights of 8 bits, also of joined projections, of 16-bit activations."""

    def __init__(self, weights: PackedWeights, bias: nn.Parameter | None, scheme: Scheme) -> None:
        super().__init__(weights, bias, scheme)
        self.register_buffer("arrived", none_arrived(weights.num_outputs, weights.values.device), persistent=False)
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

    @property
    def takes_rounded_rows(self) -> bool:
        """Whether its inputs are rounded as they come, a row by one number of its own."""
        return self.scheme.activations is Activations.TOKEN and self.order is None and self.rotation is None

    def of_rounded_rows(
        self, rounded: torch.Tensor, of_rows: torch.Tensor, dtype: torch.dtype, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """rounded [R, in_features] of the weights' type, of_rows [R, 1]: what `round_rows` makes of inputs of this
        type, and `forward` of those, [R, out_features]; added to onto [R, out_features], if there is any."""
        out: torch.Tensor = _rounded_product(
            rounded, of_rows, self.values, self.scales, self.bias, onto, self.arrived, self.group_size, dtype
        )
        return out

    def gate_of_rounded_rows(
        self, rounded: torch.Tensor, of_rows: torch.Tensor, dtype: torch.dtype, kind: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `of_rounded_rows`, of an MLP's gate and up: silu(gate) * up, its rows rounded to this kind, and their
        scales [R, 1]."""
        found: tuple[torch.Tensor, torch.Tensor] = _rounded_gate(
            rounded, of_rows, self.values, self.scales, self.bias, self.arrived, self.group_size, dtype, kind
        )
        return found


def quantised_card_linear(layer: QuantisedLinear) -> QuantisedCardLinear | None:
    """Its tensors shared. None for one that stands here already."""
    return (
        None if isinstance(layer, QuantisedCardLinear) else QuantisedCardLinear(layer.weights, layer.bias, layer.scheme)
    )
