"""Attention of prompt chunks over the paged pool, the chunk's own keys included: they are written before.

Flash attention (Dao, "FlashAttention-2", 2023) with keys and values found through the block table. Keys that every
query of a tile sees go through a loop without a mask; the rest, around the diagonal, through one with it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.pool_numbers import as_numbers, as_queries, is_compiled
from replicas.kernels.running_softmax import weights_of_tile

_LOG2_E = 1.4426950408889634


@triton.jit
def _attend_tile(
    query, kv, out, table, slots, chunks, scale_log2, query_stride_token, query_stride_head, kv_stride_block,
    table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    chunk, head = tl.program_id(1), tl.program_id(2)
    start = tl.load(chunks + chunk * 3).to(tl.int64)
    length = tl.load(chunks + chunk * 3 + 1)
    position = tl.load(chunks + chunk * 3 + 2)
    # The last tiles have the most keys: they go first.
    first_row = (tl.cdiv(length, BLOCK_M) - 1 - tl.program_id(0)) * BLOCK_M
    if first_row >= 0:
        slot = tl.load(slots + start).to(tl.int64)
        rows = first_row + tl.arange(0, BLOCK_M)
        dims = tl.arange(0, DIM_PADDED)
        is_row, is_dim = rows < length, dims < HEAD_DIM
        row_table = table + slot * table_stride
        kv_stride_token: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
        kv_head = kv + (head // GROUP) * HEAD_DIM
        is_in = is_row[:, None] & is_dim[None, :]
        q = tl.load(
            query + (start + rows[:, None]) * query_stride_token + head * query_stride_head + dims[None, :],
            mask=is_in,
            other=0.0,
        )
        q = as_queries(q, kv.dtype.element_ty)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        result = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
        end = position + tl.minimum(first_row + BLOCK_M, length)
        seen_by_all = (position + first_row + 1) // BLOCK_N * BLOCK_N
        largest, total, result = _attend_keys(
            q, kv_head, kv_stride_block, row_table, 0, seen_by_all, position, rows, dims, is_dim, scale_log2,
            largest, total, result, kv_stride_token, BLOCK_SIZE, BLOCK_N, PRECISION, IS_COMPILED, False,
        )  # fmt: skip
        largest, total, result = _attend_keys(
            q, kv_head, kv_stride_block, row_table, seen_by_all, end, position, rows, dims, is_dim, scale_log2,
            largest, total, result, kv_stride_token, BLOCK_SIZE, BLOCK_N, PRECISION, IS_COMPILED, True,
        )  # fmt: skip
        result = result / total[:, None]
        num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
        places_out = ((start + rows[:, None]) * num_heads + head) * HEAD_DIM + dims[None, :]
        tl.store(out + places_out, result.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _attend_keys(
    q, kv_head, kv_stride_block, row_table, start, end, position, rows, dims, is_dim, scale_log2, largest, total,
    result,
    STRIDE_TOKEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    IS_COMPILED: tl.constexpr, IS_DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Go on with the sums over keys from start to end. IS_DIAGONAL: not all of the rows see all of these; else the last
    tile is a whole one. kv_head: pointer to the head's first key. -> largest, total, result by now."""
    for first in range(start, end, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)
        if IS_DIAGONAL:
            is_token = tokens < end
            blocks = tl.load(row_table + tokens // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
            is_key, is_value = is_token[None, :] & is_dim[:, None], is_token[:, None] & is_dim[None, :]
        else:
            blocks = tl.load(row_table + tokens // BLOCK_SIZE).to(tl.int64)
            is_key, is_value = is_dim[:, None], is_dim[None, :]
        places = blocks * kv_stride_block + (tokens % BLOCK_SIZE) * STRIDE_TOKEN
        k = tl.load(kv_head + places[None, :] + dims[:, None], mask=is_key, other=0.0)
        scores = tl.dot(q, as_numbers(k, q.dtype, IS_COMPILED), input_precision=PRECISION) * scale_log2
        if IS_DIAGONAL:
            is_seen = tokens[None, :] <= position + rows[:, None]
            scores = tl.where(is_seen & is_token[None, :], scores, float("-inf"))
        # A row may see no key around the diagonal, nor one before.
        weights, shrink, largest = weights_of_tile(scores, largest, not IS_DIAGONAL)
        values = kv_head + BLOCK_SIZE * STRIDE_TOKEN + places[:, None] + dims[None, :]
        v = as_numbers(tl.load(values, mask=is_value, other=0.0), q.dtype, IS_COMPILED)
        result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
    return largest, total, result


def paged_prefill(
    query: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    chunks: torch.Tensor,
    num_chunks: int,
    longest: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of chunks over everything of their sequences up to and with themselves.

    query [T, num_heads, head_dim], any strides but the last; kv, table as in `paged_decode`; slots int32 [T].
    chunks: int32 [>= num_chunks, 3] rows (first token in query, length, position of the first token); longest: the
    longest of them. out [T, num_heads, head_dim], contiguous: only the chunks' tokens are written. Does not block.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = kv.shape[3]
    padded = triton.next_power_of_2(head_dim)
    if query.element_size() > 2:
        block_m, block_n, num_warps, num_stages = (32 if padded > 128 else 64), 32, 4, 1
    elif padded > 128:
        block_m, block_n, num_warps, num_stages = 64, 32, 4, 2
    elif kv.dtype is query.dtype:
        # 2,048 tokens, first and behind 4,096 (Llama-3.1-8B, H200): 146 and 560 us a layer; tiles of 128, 156 and 580.
        block_m, block_n, num_warps, num_stages = 64, 64, 4, 3
    else:
        block_m, block_n, num_warps, num_stages = 128, 64, 8, 3  # each tile makes its keys numbers anew
    _attend_tile[(triton.cdiv(longest, block_m), num_chunks, num_heads)](
        query, kv, out, table, slots, chunks, scale * _LOG2_E, query.stride(0), query.stride(1), kv.stride(0),
        table.stride(0), NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        DIM_PADDED=padded, BLOCK_SIZE=kv.shape[2], BLOCK_M=block_m, BLOCK_N=block_n, PRECISION="ieee",
        IS_COMPILED=is_compiled(query.device), num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
