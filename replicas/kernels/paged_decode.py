"""Decode attention over the paged pool: one query token per sequence, split along its context.

The algorithm is flash-decoding (Dao et al., "Flash-Decoding for long-context inference", 2023): each program attends
over one split of one sequence's keys and keeps a running softmax (Milakov and Gimelshein, 2018); a second kernel
weighs the splits by their log-sum-exp. The heads that share a KV head are the rows of one matrix product, so K and V
are read once. The program whose split holds the new token writes its k and v first: no kernel of its own for that.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634


@triton.jit
def _attend_split(
    query,
    key,
    value,
    kv,
    out,
    partial,
    lse,
    table,
    slots,
    positions,
    scale_log2,
    min_split,
    query_stride_token,
    query_stride_head,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    kv_stride_block,
    table_stride,
    NUM_SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    length = position + 1  # 0 in a padding row
    split_length = tl.cdiv(tl.cdiv(length, NUM_SPLITS), BLOCK_N) * BLOCK_N
    split_length = tl.maximum(split_length, min_split)
    start = split * split_length
    end = tl.minimum(start + split_length, length)
    dims = tl.arange(0, DIM_PADDED)
    is_dim = dims < HEAD_DIM
    row_table = table + slot * table_stride
    kv_stride_value: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM
    kv_stride_token: tl.constexpr = NUM_KV_HEADS * HEAD_DIM

    if (start <= position) & (position < end):
        block = tl.load(row_table + position // BLOCK_SIZE).to(tl.int64)
        place = kv + block * kv_stride_block + (position % BLOCK_SIZE) * kv_stride_token + head * HEAD_DIM + dims
        new_key = tl.load(key + row * key_stride_token + head * key_stride_head + dims, mask=is_dim)
        new_value = tl.load(value + row * value_stride_token + head * value_stride_head + dims, mask=is_dim)
        tl.store(place, new_key, mask=is_dim)
        tl.store(place + kv_stride_value, new_value, mask=is_dim)
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
        result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        largest = new_largest

    has_any = start < end
    result = tl.where(has_any, result / tl.where(has_any, total, 1.0)[:, None], 0.0)
    is_out = is_member[:, None] & is_dim[None, :]
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    if NUM_SPLITS == 1:
        places_out = (row * num_heads + heads[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(out + places_out, result.to(out.dtype.element_ty), mask=is_out)
    else:
        index = (row * num_heads + heads) * NUM_SPLITS + split
        tl.store(lse + index, tl.where(has_any, largest + tl.log2(total), float("-inf")), mask=is_member)
        tl.store(partial + index[:, None] * HEAD_DIM + dims[None, :], result, mask=is_out & has_any)


@triton.jit
def _weigh_splits(
    out,
    partial,
    lse,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    splits = tl.arange(0, SPLITS_PADDED)
    dims = tl.arange(0, DIM_PADDED)
    logs = tl.load(lse + index * NUM_SPLITS + splits, mask=splits < NUM_SPLITS, other=float("-inf"))
    largest = tl.max(logs, 0)
    has_any = largest > float("-inf")
    weights = tl.exp2(logs - tl.where(has_any, largest, 0.0))
    is_used = (logs > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    places = (index * NUM_SPLITS + splits[:, None]) * HEAD_DIM + dims[None, :]
    parts = tl.load(partial + places, mask=is_used, other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(has_any, total, 1.0)
    tl.store(out + index * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    num_splits: int,
    min_split: int,
    out: torch.Tensor,
    tile: tuple[int, int, int] | None = None,
) -> None:
    """Write each row's k and v into the pool, then attend over positions 0..position of its slot's blocks.

    query [R, num_heads, head_dim]; key, value [R, num_kv_heads, head_dim]; any strides but the last. kv: one layer's
    view [num_blocks, 2, block_size, num_kv_heads, head_dim], contiguous but for the first. table: int64 [num_slots,
    max_blocks]; slots, positions: int32 [R], position -1 for a padding row: it writes nothing, and its output is 0.
    out: contiguous [R, num_heads, head_dim]. num_splits: programs along a context; none is given less than min_split
    tokens. tile: keys at once, warps and stages of a program, for measurements.
    Mutates kv and out. Does not block.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv.shape[3], kv.shape[2]
    group = num_heads // num_kv_heads
    partial, lse = out, out
    if num_splits > 1:
        partial = torch.empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=query.device)
    wide = kv.element_size() > 2 or head_dim > 128
    block_n, num_warps, num_stages = tile or ((32, 4, 2) if wide else (64, 4, 2))
    constants: dict[str, Any] = {"HEAD_DIM": head_dim, "DIM_PADDED": triton.next_power_of_2(head_dim)}
    _attend_split[(num_rows, num_kv_heads, num_splits)](
        query,
        key,
        value,
        kv,
        out,
        partial,
        lse,
        table,
        slots,
        positions,
        scale * _LOG2_E,
        min_split,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv.stride(0),
        table.stride(0),
        NUM_SPLITS=num_splits,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        PRECISION="ieee",
        num_warps=num_warps,
        num_stages=num_stages,
        **constants,
    )
    if num_splits > 1:
        padded = triton.next_power_of_2(num_splits)
        _weigh_splits[(num_rows * num_heads,)](
            out, partial, lse, NUM_SPLITS=num_splits, SPLITS_PADDED=padded, num_warps=2, **constants
        )
