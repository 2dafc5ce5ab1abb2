"""Linear layers that read their weights at full bandwidth when there are few tokens; CUDA only.

A library's matrix product of one row reaches about 80 % of the card's bandwidth on such shapes, a plain kernel 90 %. Of
some rows the library is the better one, but for these, measured on an H100 at every layer of Llama-3.1-8B and
Qwen3-0.6B: up to 16 rows, many outputs of few inputs (5 % faster); up to 64 rows, very many outputs (3 to 8 %).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from replicas.cuda.kernels.gemv import gemv
from replicas.cuda.kernels.skinny_product import skinny_product
from replicas.cuda.operators import operator
from replicas.model.fused_projections import JoinedLinear

_FEW, _SOME = 16, 64  # rows
_MANY_OUTPUTS, _VERY_MANY_OUTPUTS, _FEW_INPUTS = 4096, 16384, 4096
# Features and columns at once, warps and stages.
_TILE_OF_FEW, _TILE_OF_SOME = (64, 128, 4, 4), (64, 128, 4, 3)


def single_row_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] with one row in all, weight [N, K], bias [N] -> [..., N]."""
    return gemv(x.contiguous(), weight, bias).view(*x.shape[:-1], -1)


def _shape_of_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def product_of_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N], by whatever is the fastest for so many rows.

    An operator of its own so that a compiled layer is the same for all of them.
    """
    rows = x.flatten(0, -2)
    num_outputs, num_inputs = weight.shape
    if 0 < len(rows) <= _FEW and num_outputs >= _MANY_OUTPUTS and num_inputs <= _FEW_INPUTS:
        out = skinny_product(rows.contiguous(), weight, bias, _TILE_OF_FEW)
    elif 0 < len(rows) <= _SOME and num_outputs >= _VERY_MANY_OUTPUTS:
        out = skinny_product(rows.contiguous(), weight, bias, _TILE_OF_SOME)
    else:
        return F.linear(x, weight, bias)
    return out.view(*x.shape[:-1], num_outputs)


_single_row_product = operator(single_row_product, _shape_of_product)
_product_of_rows = operator(product_of_rows, _shape_of_product)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As F.linear. Raises nothing of its own."""
    if x.dim() == 3 and x.shape[0] == 1 and x.shape[1] == 1:
        out: torch.Tensor = _single_row_product(x, weight, bias)
        return out
    if weight.shape[0] >= _MANY_OUTPUTS:
        many: torch.Tensor = _product_of_rows(x, weight, bias)
        return many
    return F.linear(x, weight, bias)


class SkinnyLinear(nn.Linear):
    """A linear layer whose few rows take the kernels."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return product(input, self.weight, self.bias)


class SkinnyJoinedLinear(JoinedLinear):
    """Joined projections whose few rows take the kernels."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight, self.bias)


def use_skinny_products(model: nn.Module) -> int:
    """Change plain and joined linear layers of 16-bit weights, in place; how many. Mutates the model's classes only."""
    count = 0
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.element_size() == 2:
            module.__class__ = SkinnyLinear
        elif type(module) is JoinedLinear and module.weight.element_size() == 2:
            module.__class__ = SkinnyJoinedLinear
        else:
            continue
        count += 1
    return count
