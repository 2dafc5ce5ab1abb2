"""Linear layers that read their weights at full bandwidth when there are few tokens; CUDA only.

Up to 64 rows the kernels here beat a library's at every layer of Llama-3.1-8B and Qwen3-0.6B, or come level (on an
H200, behind a norm as in a step). Beyond, arithmetic counts, at which the library is better (on a part of a card by
ways chosen for it: `part_products`). What an MLP makes of its products of few rows is made within them: the sum with
what the layer was given, and silu(gate) * up of up to 16. A kernel of its own costs more than its bytes do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from replicas.cuda.operators import operator
from replicas.cuda.part_products import part_here
from replicas.kernels.gated_rows import gated_rows
from replicas.kernels.gemv import gemv
from replicas.kernels.parts_of_product import NARROWEST, none_arrived
from replicas.kernels.skinny_product import MOST_ROWS, ProductTile, skinny_product
from replicas.layers.linear import PlainLinear, plain_linear

_VERY_MANY_OUTPUTS, _MANY_INPUTS = 16384, 4096
_MOST_GATED = 16  # rows whose gates are made within the product


def tile_of(num_rows: int, num_out: int, num_in: int) -> ProductTile:
    """The fastest, or nearly, of ten tiles and four numbers of parts; of those that fit the 99 KB that a program has on
    compute capability 8.6 and its like."""
    if num_out >= _VERY_MANY_OUTPUTS:
        return ProductTile(NARROWEST, 128, 4, 4 if num_rows <= 32 else 3, 1)
    if num_out > 4096 or num_in < 2048:
        return ProductTile(NARROWEST, 128, 4, 4, 1)
    if num_in >= _MANY_INPUTS:
        return ProductTile(NARROWEST, 256, 4, 3, 2) if num_rows <= 32 else ProductTile(NARROWEST, 128, 4, 4, 2)
    return ProductTile(NARROWEST, 128, 4, 4, 4 if num_out <= 2048 else 2)


def single_row_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] with one row in all, weight [N, K], bias [N] -> [..., N]."""
    return gemv(x.contiguous(), weight, bias).view(*x.shape[:-1], -1)


def _shape_of_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def product_of_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor
) -> torch.Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N], by whatever is the fastest for so many rows. arrived as in
    `skinny_product`.

    An operator of its own so that a compiled layer is the same for all of them.
    """
    rows = x.reshape(-1, weight.shape[1])
    if not 0 < len(rows) <= MOST_ROWS:
        return _of_many_rows(rows, weight, bias).view(*x.shape[:-1], len(weight))
    out = skinny_product(rows.contiguous(), weight, bias, tile_of(len(rows), *weight.shape), arrived)
    return out.view(*x.shape[:-1], -1)


def gate_of_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor
) -> torch.Tensor:
    """As `product_of_rows`, of an MLP's gate and up, [N] of both: silu(gate) * up [..., N / 2]. Within the product of
    few rows: of 64 it lost some 1 % of a step of Llama-3.1-8B, as reckoned from steps that had more changed (H200)."""
    rows = x.reshape(-1, weight.shape[1]).contiguous()
    if len(rows) == 1:
        out = gemv(rows, weight, bias, is_gated=True)
    elif 0 < len(rows) <= _MOST_GATED:
        out = skinny_product(rows, weight, bias, tile_of(len(rows), *weight.shape), arrived, is_gated=True)
    else:
        out = gated_rows(product_of_rows(rows, weight, bias, arrived))
    return out.view(*x.shape[:-1], len(weight) // 2)


def sum_of_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, onto: torch.Tensor, arrived: torch.Tensor
) -> torch.Tensor:
    """As `product_of_rows`; the product, rounded to x's type, is added to onto [..., N]."""
    rows, given = x.reshape(-1, weight.shape[1]).contiguous(), onto.reshape(-1, len(weight)).contiguous()
    if len(rows) == 1:
        out = gemv(rows, weight, bias, onto=given)
    elif 0 < len(rows) <= MOST_ROWS:
        out = skinny_product(rows, weight, bias, tile_of(len(rows), *weight.shape), arrived, onto=given)
    else:
        out = _of_many_rows(rows, weight, bias).add_(given)
    return out.view(onto.shape)


def _of_many_rows(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """rows [R, K] -> [R, N], new memory."""
    part = part_here() if bias is None else None
    many = part.product(rows, weight) if part is not None else None
    return F.linear(rows, weight, bias) if many is None else many


def _shape_of_gate(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


def _shape_of_sum(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, onto: torch.Tensor, arrived: torch.Tensor
) -> torch.Tensor:
    return x.new_empty(onto.shape)


_single_row_product = operator(single_row_product, _shape_of_product)
_product_of_rows = operator(product_of_rows, _shape_of_product)
_gate_of_rows = operator(gate_of_rows, _shape_of_gate)
_sum_of_rows = operator(sum_of_rows, _shape_of_sum)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor) -> torch.Tensor:
    """As F.linear. arrived as in `skinny_product`. Raises nothing of its own."""
    if x.dim() == 3 and x.shape[0] == 1 and x.shape[1] == 1:
        out: torch.Tensor = _single_row_product(x, weight, bias)
        return out
    rows: torch.Tensor = _product_of_rows(x, weight, bias, arrived)
    return rows


class SkinnyLinear(PlainLinear):
    """A linear layer, also of joined projections, whose few rows take the kernels."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__(weight, bias)
        self.register_buffer("arrived", none_arrived(weight.shape[0], weight.device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight, self.bias, self.arrived)  # type: ignore[arg-type]

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Of an MLP's gate and up, joined: silu(gate) * up, in float32, of what `forward` gives; rounded once. x
        [..., in_features] -> [..., out_features / 2]."""
        out: torch.Tensor = _gate_of_rows(x, self.weight, self.bias, self.arrived)
        return out

    def added(self, x: torch.Tensor, onto: torch.Tensor) -> torch.Tensor:
        """What `forward` gives added to onto [..., out_features]."""
        out: torch.Tensor = _sum_of_rows(x, self.weight, self.bias, onto, self.arrived)
        return out


def skinny_linear(module: nn.Module) -> SkinnyLinear | None:
    """For a plain linear layer of 16-bit weights, its tensors shared."""
    layer = plain_linear(module)
    if layer is None or layer.weight.element_size() != 2 or not layer.weight.is_contiguous():
        return None
    return SkinnyLinear(layer.weight, layer.bias)


def count_apart(model: nn.Module) -> int:
    """Give these layers of a twin counts of their own, so that it may run while the other one does; how many. Mutates
    the model."""
    layers = [module for module in model.modules() if isinstance(getattr(module, "arrived", None), torch.Tensor)]
    for module in layers:
        module.arrived = torch.zeros_like(module.arrived)  # type: ignore[arg-type]
    return len(layers)
