"""What pieces of a row's context give, stored, and weighed by their log-sum-exp: what `paged_decode` ends with.

By the last program of a row's pieces to have ended, where `paged_decode` `stands_alone`: a kernel of its own takes as
long again as two of its loads. Else by that kernel, the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import wait_for_earlier
from replicas.kernels.parts_of_product import is_last_to_arrive
from replicas.kernels.work_sharing import count_places

_WEIGHING_ROWS = 64
_AT_ONCE = tl.constexpr(10)  # pieces whose results are read together: no more registers than attention takes


@triton.jit
def store_piece(
    out, partial, lse, result, largest, total, piece, query_of, token_of, heads, is_member, dims, is_dim, start,
    is_last,
    QUERIES: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """What came of the only piece of a row is its output; of one of several, a part of it with its log-sum-exp."""
    result = result / total[:, None]
    is_out = is_member[:, None] & is_dim[None, :]
    if (start == 0) & is_last:
        places_out = (token_of * NUM_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(out + places_out, result.to(out.dtype.element_ty), mask=is_out)
    else:
        index = (piece * QUERIES + query_of) * NUM_HEADS + heads
        tl.store(lse + index, largest + tl.log2(total), mask=is_member)
        tl.store(partial + index[:, None] * HEAD_DIM + dims[None, :], result, mask=is_out)


@triton.jit
def weighed_pieces(
    partial, lse, places, logs_at, step, logs_step, first, end, is_head, is_number
):  # fmt: skip
    """Results of pieces first to end - 1 as one, [heads, dims]. partial, lse: their numbers and log-sum-exps, at places
    [heads, dims] and logs_at [heads] of piece 0, and step and logs_step further each time.

    Piece by piece, so that whoever has the numbers adds them in the same order; they are read together."""
    largest = tl.full(logs_at.shape, float("-inf"), tl.float32)
    total = tl.zeros(logs_at.shape, tl.float32)
    result = tl.zeros(places.shape, tl.float32)
    for some in range(first, end, _AT_ONCE):
        # Not from a processor's own cache, which may have what lay there before: other programs wrote it just now.
        parts: tl.tuple = ()
        for number in tl.static_range(_AT_ONCE):
            piece = some + number
            at = partial + places + piece * step
            parts += (tl.load(at, mask=is_number & (piece < end), other=0.0, cache_modifier=".cg"),)
        logs: tl.tuple = ()
        new_largest = largest
        for number in tl.static_range(_AT_ONCE):
            piece = some + number
            at = lse + logs_at + piece * logs_step
            log = tl.load(at, mask=is_head & (piece < end), other=float("-inf"), cache_modifier=".cg")
            logs += (log,)
            new_largest = tl.maximum(new_largest, log)
        shrink = tl.exp2(largest - new_largest)
        result *= shrink[:, None]
        total *= shrink
        for number in tl.static_range(_AT_ONCE):
            weight = tl.exp2(logs[number] - new_largest)
            result += parts[number] * weight[:, None]
            total += weight
        largest = new_largest
    return result / total[:, None]


@triton.jit
def weigh_if_last(
    out, partial, lse, shares, num_numbers, row, head, first, end, dims, is_dim,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
) -> None:  # fmt: skip
    """By each program that has stored what its piece gives, of pieces first to end - 1 of a row and a KV head: where
    there are several, the last one of them writes the row's output. Counts are zeros before and afterwards."""
    if end > first + 1:
        place = count_places(shares, num_numbers, row, head, NUM_KV_HEADS)
        if is_last_to_arrive(place, end - first):
            tl.debug_barrier()
            members = tl.arange(0, GROUP_PADDED)
            is_head = members < GROUP
            heads = head * GROUP + members
            places, is_number = heads[:, None] * HEAD_DIM + dims[None, :], is_head[:, None] & is_dim[None, :]
            size: tl.constexpr = NUM_KV_HEADS * GROUP * HEAD_DIM
            result = weighed_pieces(
                partial, lse, places, heads, size, NUM_KV_HEADS * GROUP, first, end, is_head, is_number
            )
            tl.store(out + row * size + places, result.to(out.dtype.element_ty), mask=is_number)
            tl.store(place, 0)


@triton.jit(do_not_specialize=["num_rows"])
def _weigh_pieces(
    out, partial, lse, shares, num_rows,
    NUM_HEADS: tl.constexpr, QUERIES: tl.constexpr, ROWS_AT: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, ROWS: tl.constexpr, IS_EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Rows that lie in several pieces. Of several queries: each is a row here, of QUERIES that a row may have."""
    wait_for_earlier(IS_EARLY)
    heads = tl.program_id(1) + tl.arange(0, 1)
    dims = tl.arange(0, DIM_PADDED)
    is_head = heads >= 0
    is_number = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    numbers = heads[:, None] * HEAD_DIM + dims[None, :]
    size: tl.constexpr = NUM_HEADS * HEAD_DIM
    for row in range(tl.program_id(0), num_rows, ROWS):
        sharer, query, token = row, 0, row
        if QUERIES > 1:
            sharer, query = row // QUERIES, row % QUERIES
        first, end = tl.load(shares + sharer * 4 + 3), tl.load(shares + sharer * 4 + 7)
        if QUERIES > 1:
            of_row = shares + (ROWS_AT + sharer) * 4
            token = tl.load(of_row + 1) + query
            end = tl.where(query < tl.load(of_row + 2), end, first)
        if end > first + 1:
            result = weighed_pieces(
                partial, lse, query * size + numbers, query * NUM_HEADS + heads, QUERIES * size, QUERIES * NUM_HEADS,
                first, end, is_head, is_number,
            )  # fmt: skip
            tl.store(out + token * size + numbers, result.to(out.dtype.element_ty), mask=is_number)


def weigh_pieces(
    out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor, shares: torch.Tensor, num_rows: int, num_queries: int,
    constants: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write the rows of out [.., num_heads, head_dim] whose contexts lie in several pieces.

    partial: float32 [pieces * num_queries, num_heads, head_dim], each piece's results, and lse [.., num_heads].
    num_rows: rows, of at most num_queries queries each. shares as `paged_decode` has them; constants: those that both
    kernels have. Mutates out. Does not block.
    """
    num_heads, num_weighed = out.shape[1], num_rows * num_queries
    _weigh_pieces[(min(num_weighed, _WEIGHING_ROWS), num_heads)](
        out, partial, lse, shares, num_weighed, NUM_HEADS=num_heads, QUERIES=num_queries, ROWS=_WEIGHING_ROWS,
        num_warps=2, **constants,
    )  # fmt: skip
