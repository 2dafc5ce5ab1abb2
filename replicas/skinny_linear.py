"""Linear layers that read their weights at full bandwidth when there is a single token; CUDA only.

A library's matrix product of one row reaches about 80 % of the card's bandwidth on such shapes, a plain kernel 90 %.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from replicas.fused_projections import JoinedLinear
from replicas.kernels.gemv import gemv


@torch.library.custom_op("splitserve::single_row_product", mutates_args=())
def single_row_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] with one row in all, weight [N, K], bias [N] -> [..., N]."""
    return gemv(x.contiguous(), weight, bias).view(*x.shape[:-1], -1)


@single_row_product.register_fake
def _shape_of_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As F.linear. Raises nothing of its own."""
    if x.dim() == 3 and x.shape[0] == 1 and x.shape[1] == 1:
        out: torch.Tensor = single_row_product(x, weight, bias)
        return out
    return F.linear(x, weight, bias)


class SkinnyLinear(nn.Linear):
    """A linear layer whose single rows take the kernel."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return product(input, self.weight, self.bias)


class SkinnyJoinedLinear(JoinedLinear):
    """Joined projections whose single rows take the kernel."""

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
