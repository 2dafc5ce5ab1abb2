"""Decode attention over the paged pool: one query token per sequence, its context cut into pieces of like length.

The algorithm is flash-decoding (Dao et al., "Flash-Decoding for long-context inference", 2023): each program attends
over one piece of one sequence's keys and keeps a running softmax (Milakov and Gimelshein, 2018); a second kernel weighs
the pieces by their log-sum-exp. How long a piece may be follows from all contexts of the step, so that neither one long
context nor a last wave of programs holds up the rest (the aim of Sanovar et al., "Lean Attention", 2024). The heads
that share a KV head are the rows of one matrix product, so K and V are read once. The program of a row's last piece
writes its new k and v first: no kernel of its own for that.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, wait_for_earlier
from replicas.kernels.kv_write import token_place
from replicas.kernels.pool_numbers import as_numbers, is_compiled

_LOG2_E = 1.4426950408889634
_WEIGHING_ROWS = 64


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _attend_piece(
    query, key, value, kv, out, partial, lse, table, slots, positions, shares, scale_log2, query_stride_token,
    query_stride_head, key_stride_token, key_stride_head, value_stride_token, value_stride_head, kv_stride_block,
    table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    IS_COMPILED: tl.constexpr, IS_EARLY: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_earlier(IS_EARLY)
    # Heads next to each other: their programs read the same blocks at about the same time.
    piece, head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    row = tl.load(shares + piece * 4)
    start = tl.load(shares + piece * 4 + 1) * BLOCK_N
    end = tl.load(shares + piece * 4 + 2) * BLOCK_N
    if start < end:
        slot = tl.load(slots + row).to(tl.int64)
        position = tl.load(positions + row)
        is_last = end > position
        end = tl.minimum(end, position + 1)
        dims = tl.arange(0, DIM_PADDED)
        is_dim = dims < HEAD_DIM
        row_table = table + slot * table_stride
        kv_stride_value: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM
        kv_stride_token: tl.constexpr = NUM_KV_HEADS * HEAD_DIM

        if is_last:
            token = token_place(kv, row_table, position, kv_stride_block, kv_stride_token, BLOCK_SIZE)
            place = token + head * HEAD_DIM + dims
            new_key = tl.load(key + row * key_stride_token + head * key_stride_head + dims, mask=is_dim)
            new_value = tl.load(value + row * value_stride_token + head * value_stride_head + dims, mask=is_dim)
            stored = kv.dtype.element_ty
            tl.store(place, new_key.to(stored), mask=is_dim)
            tl.store(place + kv_stride_value, new_value.to(stored), mask=is_dim)
        tl.debug_barrier()  # the loop below reads what was just written

        members = tl.arange(0, GROUP_PADDED)
        is_member = members < GROUP
        heads = head * GROUP + members
        q = tl.load(
            query + row * query_stride_token + heads[:, None] * query_stride_head + dims[None, :],
            mask=is_member[:, None] & is_dim[None, :],
            other=0.0,
        )
        largest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PADDED], tl.float32)
        result = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
        for first in range(start, end, BLOCK_N):
            tokens = first + tl.arange(0, BLOCK_N)
            is_token = tokens < end
            blocks = tl.load(row_table + tokens // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
            places = blocks * kv_stride_block + (tokens % BLOCK_SIZE) * kv_stride_token + head * HEAD_DIM
            k = tl.load(kv + places[None, :] + dims[:, None], mask=is_token[None, :] & is_dim[:, None], other=0.0)
            k = as_numbers(k, q.dtype, IS_COMPILED)
            scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
            scores = tl.where(is_token[None, :], scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_largest[:, None])
            shrink = tl.exp2(largest - new_largest)
            v = tl.load(
                kv + kv_stride_value + places[:, None] + dims[None, :],
                mask=is_token[:, None] & is_dim[None, :],
                other=0.0,
            )
            v = as_numbers(v, q.dtype, IS_COMPILED)
            result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            total = total * shrink + tl.sum(weights, 1)
            largest = new_largest

        result = result / total[:, None]
        is_out = is_member[:, None] & is_dim[None, :]
        num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
        if (start == 0) & is_last:
            places_out = (row * num_heads + heads[:, None]) * HEAD_DIM + dims[None, :]
            tl.store(out + places_out, result.to(out.dtype.element_ty), mask=is_out)
        else:
            index = piece * num_heads + heads
            tl.store(lse + index, largest + tl.log2(total), mask=is_member)
            tl.store(partial + index[:, None] * HEAD_DIM + dims[None, :], result, mask=is_out)


@triton.jit(do_not_specialize=["num_rows"])
def _weigh_pieces(
    out, partial, lse, shares, num_rows,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Rows that lie in several pieces."""
    wait_for_earlier(IS_EARLY)
    head = tl.program_id(1)
    dims = tl.arange(0, DIM_PADDED)
    is_dim = dims < HEAD_DIM
    for row in range(tl.program_id(0), num_rows, ROWS):
        first, end = tl.load(shares + row * 4 + 3), tl.load(shares + row * 4 + 7)
        if end > first + 1:
            largest = tl.full([], float("-inf"), tl.float32)
            total = tl.zeros([], tl.float32)
            result = tl.zeros([DIM_PADDED], tl.float32)
            for some in range(first, end, PIECES):
                pieces = some + tl.arange(0, PIECES)
                index = pieces * NUM_HEADS + head
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
            place = out + (row * NUM_HEADS + head) * HEAD_DIM + dims
            tl.store(place, (result / total).to(out.dtype.element_ty), mask=is_dim)


def paged_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    shares: torch.Tensor,
    num_pieces: int,
    tile_len: int,
    scale: float,
    out: torch.Tensor,
    num_warps: int = 4,
    num_stages: int = 2,
) -> None:
    """Write each row's k and v into the pool, then attend over positions 0..position of its slot's blocks.

    query [R, num_heads, head_dim]; key, value [R, num_kv_heads, head_dim]; any strides but the last. kv: one layer's
    view [num_blocks, 2, block_size, num_kv_heads, head_dim], contiguous but for the first, in the query's type; or FP8,
    whose numbers are made the query's type before they are multiplied: then key and value are such numbers too. table:
    int64 [num_slots, max_blocks]; slots, positions: int32 [R], position -1 for a padding row: it writes nothing, and
    its output is left as it is. shares: as a WorkSharing gives it for these positions; num_pieces, tile_len: its
    `most_pieces` and `tile_len` of R. out: contiguous [R, num_heads, head_dim].
    num_warps, num_stages: of a program, for measurements.
    Mutates kv and out. Does not block.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv.shape[3], kv.shape[2]
    group = num_heads // num_kv_heads
    partial = torch.empty(num_pieces, num_heads, head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(num_pieces, num_heads, dtype=torch.float32, device=query.device)
    is_early = launches_early(query.device)
    constants: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "DIM_PADDED": triton.next_power_of_2(head_dim),
        "IS_EARLY": is_early,
        "launch_pdl": is_early,
    }
    _attend_piece[(num_pieces * num_kv_heads,)](
        query, key, value, kv, out, partial, lse, table, slots, positions, shares, scale * _LOG2_E, query.stride(0),
        query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1), kv.stride(0), table.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        BLOCK_SIZE=block_size, BLOCK_N=tile_len, PRECISION="ieee", IS_COMPILED=is_compiled(query.device),
        num_warps=num_warps, num_stages=num_stages, **constants,
    )  # fmt: skip
    _weigh_pieces[(min(num_rows, _WEIGHING_ROWS), num_heads)](
        out, partial, lse, shares, num_rows, NUM_HEADS=num_heads, ROWS=_WEIGHING_ROWS, PIECES=16, num_warps=2,
        **constants,
    )  # fmt: skip
