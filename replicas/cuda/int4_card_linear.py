"""Linear layers of weights of 4 bits on a card: a kernel of ours for few rows, the library's for more; CUDA only.

The same product as that of `QuantisedLinear`, whatever the number of rows: for many all weights are made numbers by a
kernel of its own, for few they are within the product. So are the sum behind an MLP (`added`), and of one row its gate
(`gated`).
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import nn

from replicas.cuda.operators import operator
from replicas.cuda.quantised_tiles import int4_tile
from replicas.kernels.gated_rows import gated_rows
from replicas.kernels.int4_gemv import int4_gemv, multiplies_right
from replicas.kernels.int4_product import int4_product
from replicas.kernels.int4_unpack import int4_unpack
from replicas.kernels.int4_words import group_factors, numbers_of, words_of
from replicas.kernels.parts_of_product import none_arrived
from replicas.kernels.skinny_product import MOST_ROWS
from replicas.layers.packed_weights import PackedWeights, pack_int4, unpack_int4
from replicas.layers.quantised_linear import QuantisedLinear
from replicas.quantisation.scheme import Scheme

logger = logging.getLogger(__name__)


def product_of_int4(
    x: torch.Tensor, words: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor,
    group_size: int,
) -> torch.Tensor:  # fmt: skip
    """x [R, K] of 16 bits, words as `words_of` has them, factors as `group_factors`, bias [N] -> [R, N]. arrived as in
    `skinny_product`.

    An operator of its own so that a compiled layer is the same for all numbers of rows.
    """
    if 0 < len(x) <= MOST_ROWS:
        return _of_few_rows(x, words, factors, bias, arrived, group_size)
    return _of_many_rows(x, words, factors, bias, group_size)


def gate_of_int4(
    x: torch.Tensor, words: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor,
    group_size: int,
) -> torch.Tensor:  # fmt: skip
    """As `product_of_int4`, of an MLP's gate and up, [N] of both: silu(gate) * up [R, N / 2]. Within the product for
    one row only: with more it lost, when products still crowded (`dependent_launch`), and was not tried again."""
    if _is_single(x):
        return int4_gemv(x.contiguous(), words, factors, group_size, bias, is_gated=True)
    return gated_rows(product_of_int4(x, words, factors, bias, arrived, group_size))


def sum_of_int4(
    x: torch.Tensor, words: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None, onto: torch.Tensor,
    arrived: torch.Tensor, group_size: int,
) -> torch.Tensor:  # fmt: skip
    """As `product_of_int4`; the product, rounded to x's type, is added to onto [R, N]."""
    if 0 < len(x) <= MOST_ROWS:
        return _of_few_rows(x, words, factors, bias, arrived, group_size, onto.contiguous())
    return _of_many_rows(x, words, factors, bias, group_size).add_(onto)


def _of_few_rows(
    x: torch.Tensor, words: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor,
    group_size: int, onto: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """onto: as in `gemv`."""
    rows = x.contiguous()
    if _is_single(x):
        return int4_gemv(rows, words, factors, group_size, bias, onto=onto)
    tile = int4_tile(len(x), words.shape[1], x.shape[1])
    return int4_product(rows, words, factors, group_size, bias, tile, arrived, onto=onto)


def _is_single(x: torch.Tensor) -> bool:
    return len(x) == 1 and multiplies_right(x.device)


def _of_many_rows(
    x: torch.Tensor, words: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    return F.linear(x, int4_unpack(words, factors, group_size, x.shape[1], x.dtype), bias)


def _shape_of_product(
    x: torch.Tensor, words: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor,
    group_size: int,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], words.shape[1])


def _shape_of_gate(
    x: torch.Tensor, words: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor,
    group_size: int,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], words.shape[1] // 2)


def _shape_of_sum(
    x: torch.Tensor, words: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None, onto: torch.Tensor,
    arrived: torch.Tensor, group_size: int,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], words.shape[1])


_product_of_int4 = operator(product_of_int4, _shape_of_product)
_gate_of_int4 = operator(gate_of_int4, _shape_of_gate)
_sum_of_int4 = operator(sum_of_int4, _shape_of_sum)


class Int4CardLinear(QuantisedLinear):
    """A linear layer of weights of 4 bits, also of joined projections, of 16-bit activations, which are not rounded.

    values: `words_of` those that `weights` has.
    """

    factors: torch.Tensor

    def __init__(self, weights: PackedWeights, bias: nn.Parameter | None, scheme: Scheme) -> None:
        """Shares the tensors but those values."""
        super().__init__(weights, bias, scheme)
        assert weights.zeros is not None
        self.values = nn.Parameter(words_of(unpack_int4(weights.values)), requires_grad=False)
        self.register_buffer("arrived", none_arrived(weights.num_outputs, weights.values.device), persistent=False)
        self.register_buffer("factors", group_factors(weights.scales, weights.zeros), persistent=False)
        if not multiplies_right(weights.values.device):  # asked here at first, where it may take seconds
            extra = {"event": "int4_gemv_refused"}
            logger.warning("the product of one row of int4 is not right here: that of more rows is used", extra=extra)

    @property
    def weights(self) -> PackedWeights:
        """Made each time."""
        values = pack_int4(numbers_of(self.values, self.in_features))
        return PackedWeights(values, self.scales, self.group_size, self.zeros, self.order, None, self.rotation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.as_weights_have_them(x.flatten(0, -2))
        out: torch.Tensor = _product_of_int4(rows, self.values, self.factors, self.bias, self.arrived, self.group_size)
        return out.view(*x.shape[:-1], self.out_features)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """As SkinnyLinear's."""
        rows = self.as_weights_have_them(x.flatten(0, -2))
        out: torch.Tensor = _gate_of_int4(rows, self.values, self.factors, self.bias, self.arrived, self.group_size)
        return out.view(*x.shape[:-1], self.out_features // 2)

    def added(self, x: torch.Tensor, onto: torch.Tensor) -> torch.Tensor:
        """As SkinnyLinear's."""
        rows = self.as_weights_have_them(x.flatten(0, -2))
        out: torch.Tensor = _sum_of_int4(
            rows, self.values, self.factors, self.bias, onto.flatten(0, -2), self.arrived, self.group_size
        )
        return out.view(onto.shape)


def int4_card_linear(layer: QuantisedLinear) -> Int4CardLinear | None:
    """None for one that stands here already."""
    return None if isinstance(layer, Int4CardLinear) else Int4CardLinear(layer.weights, layer.bias, layer.scheme)
