"""What a layer makes of another one's product while that is made, told of, so that it can be compared with what it is
by definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class FurtherProduct:
    """linear: whose product it is made of. compute: x [R, in_features] and numbers of its type [R, out_features], that
    the product may be added to -> what is made of it. define: the product by definition, float32, and those numbers ->
    the same."""

    name: str
    linear: nn.Module
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    define: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@runtime_checkable
class MakesFurtherProducts(Protocol):
    """A layer that does."""

    def further_products(self) -> Sequence[FurtherProduct]:
        """Of its own linear layers."""
        ...
