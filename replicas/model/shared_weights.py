"""Another tree of modules over the same tensors: for a second thread that runs the same model."""

from __future__ import annotations

import copy

import torch
from torch import nn


def twin_of(model: nn.Module) -> nn.Module:
    """What is compiled, hooked or replaced in one of both concerns that one only. No weights and buffers are copied."""
    shared: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, dict(shared))
