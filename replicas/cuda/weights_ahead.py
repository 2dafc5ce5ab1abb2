"""Which weights of a product kernels in front of it fetch, and how many: a trial, off; CUDA only."""

from __future__ import annotations

import torch
from torch import nn

from replicas.kernels.dependent_launch import launches_early
from replicas.kernels.weights_ahead import Ahead, Fetched

AHEAD_BYTES = 0  # of a product's weights, by one kernel; 0: none
_UNIT, _MOST_BYTES = 256, 4096  # of a piece


def weights_of(linear: nn.Module) -> torch.Tensor | None:
    """As they lie in memory, of any of the card's linear layers."""
    found = getattr(linear, "values", None)
    found = getattr(linear, "weight", None) if found is None else found
    return found if isinstance(found, torch.Tensor) else None


def ahead_of_product(weights: torch.Tensor | None, own_bytes: int = 0) -> Fetched | None:
    """AHEAD_BYTES of weights: all, or what is first in each output's row, behind own_bytes of it; of 4 bits, whose rows
    are chunks, what is first of all. None where that is nothing. own_bytes: that the product fetches itself."""
    if not AHEAD_BYTES or weights is None or not launches_early(weights.device) or weights.data_ptr() % 16:
        return None
    pieces = pieces_of(weights, AHEAD_BYTES, own_bytes)
    return None if pieces is None else (weights, pieces)


def pieces_of(weights: torch.Tensor, num_bytes: int, own_bytes: int = 0) -> Ahead | None:
    """Of `ahead_of_product`, of so many bytes. weights: contiguous, [N, K] or `words_of`."""
    row_bytes = weights[0].nbytes
    of_row = min(num_bytes // len(weights), row_bytes - own_bytes, _MOST_BYTES) // _UNIT * _UNIT
    is_by_row = weights.dim() == 2 and row_bytes % 16 == 0 and own_bytes + of_row < row_bytes
    if is_by_row:
        return Ahead(len(weights), row_bytes, of_row, own_bytes) if of_row > 0 else None
    num_pieces = min(num_bytes, weights.nbytes) // _MOST_BYTES
    return Ahead(num_pieces, _MOST_BYTES, _MOST_BYTES, 0) if num_pieces else None
