"""What pieces of a row's context have given, weighed by their log-sum-exp: the second kernel of `paged_decode`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import wait_for_earlier

_WEIGHING_ROWS = 64


@triton.jit(do_not_specialize=["num_rows"])
def _weigh_pieces(
    out, partial, lse, shares, num_rows,
    NUM_HEADS: tl.constexpr, QUERIES: tl.constexpr, ROWS_AT: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, IS_EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Rows that lie in several pieces. Of several queries: each is a row here, of QUERIES that a row may have."""
    wait_for_earlier(IS_EARLY)
    head = tl.program_id(1)
    dims = tl.arange(0, DIM_PADDED)
    is_dim = dims < HEAD_DIM
    for row in range(tl.program_id(0), num_rows, ROWS):
        sharer, token = row, row
        if QUERIES > 1:
            sharer = row // QUERIES
        first, end = tl.load(shares + sharer * 4 + 3), tl.load(shares + sharer * 4 + 7)
        if QUERIES > 1:
            of_row = shares + (ROWS_AT + sharer) * 4
            token = tl.load(of_row + 1) + row % QUERIES
            end = tl.where(row % QUERIES < tl.load(of_row + 2), end, first)
        if end > first + 1:
            largest = tl.full([], float("-inf"), tl.float32)
            total = tl.zeros([], tl.float32)
            result = tl.zeros([DIM_PADDED], tl.float32)
            for some in range(first, end, PIECES):
                pieces = some + tl.arange(0, PIECES)
                index = pieces * NUM_HEADS + head
                if QUERIES > 1:
                    index = (pieces * QUERIES + row % QUERIES) * NUM_HEADS + head
                logs = tl.load(lse + index, mask=pieces < end, other=float("-inf"))
                parts = tl.load(
                    partial + index[:, None] * HEAD_DIM + dims[None, :],
                    mask=(pieces < end)[:, None] & is_dim[None, :],
                    other=0.0,
                )
                new_largest = tl.maximum(largest, tl.max(logs, 0))
                weights = tl.exp2(logs - new_largest)
                shrink = tl.exp2(largest - new_largest)
                result = result * shrink + tl.sum(parts * weights[:, None], 0)
                total = total * shrink + tl.sum(weights, 0)
                largest = new_largest
            place = out + (token * NUM_HEADS + head) * HEAD_DIM + dims
            tl.store(place, (result / total).to(out.dtype.element_ty), mask=is_dim)


def weigh_pieces(
    out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor, shares: torch.Tensor, num_rows: int, num_queries: int,
    constants: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write the rows of out [.., num_heads, head_dim] whose contexts lie in several pieces.

    partial: float32 [pieces, num_heads, head_dim], each piece's result, and lse [pieces, num_heads]; of several queries
    a piece has one of each. num_rows: rows, or all queries that they may have. shares as `paged_decode` has them;
    constants: those that both kernels have. Mutates out. Does not block.
    """
    num_heads = out.shape[1]
    _weigh_pieces[(min(num_rows, _WEIGHING_ROWS), num_heads)](
        out, partial, lse, shares, num_rows, NUM_HEADS=num_heads, QUERIES=num_queries, ROWS=_WEIGHING_ROWS, PIECES=16,
        num_warps=2, **constants,
    )  # fmt: skip
