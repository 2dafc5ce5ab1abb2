"""Decode attention over the paged pool: one query token per sequence, the work shared out evenly.

The keys of all rows are cut into tiles, and every group of programs (one program for each KV head) takes as many of them
as the others, wherever rows begin and end: so neither one long context nor a last wave of programs holds up the rest
(the idea of Osama et al., "Stream-K", 2023, for attention as in Sanovar et al., "Lean Attention", 2024). A program keeps a
running softmax (Milakov and Gimelshein, 2018); a row that several groups share is weighed by their log-sum-exp
(Dao et al., "Flash-Decoding for long-context inference", 2023). The heads that share a KV head are the rows of one
matrix product, so K and V are read once. The program of a row's last tile writes its new k and v first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634
# The weighing kernel holds a part of each group at once.
_MAX_GROUPS = 128


@triton.jit(do_not_specialize=["num_rows"])
def _share_out(
    positions, shares, num_rows, NUM_GROUPS: tl.constexpr, ROWS_PADDED: tl.constexpr, BLOCK_N: tl.constexpr
) -> None:
    """Row and tile at which a group begins; a row that does not exist where there is nothing left."""
    group = tl.program_id(0)
    rows = tl.arange(0, ROWS_PADDED)
    position = tl.load(positions + rows, mask=rows < num_rows, other=-1)
    tiles = (position + BLOCK_N) // BLOCK_N  # none in a padding row
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    num_used = tl.maximum(tl.minimum(total, NUM_GROUPS), 1)
    first = tl.minimum(group, num_used) * total // num_used
    is_before = ends <= first
    tl.store(shares + group * 2, tl.sum(is_before.to(tl.int32), 0))
    tl.store(shares + group * 2 + 1, first - tl.sum(tl.where(is_before, tiles, 0), 0))


@triton.jit(do_not_specialize=["num_rows"])
def _attend_share(
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
    shares,
    num_rows,
    scale_log2,
    query_stride_token,
    query_stride_head,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    kv_stride_block,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    # Heads next to each other: their programs read the same blocks at about the same time.
    group, head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    first_row, first_row_tile = tl.load(shares + group * 2), tl.load(shares + group * 2 + 1)
    last_row, last_row_tile = tl.load(shares + group * 2 + 2), tl.load(shares + group * 2 + 3)
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    kv_stride_value: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM
    kv_stride_token: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    dims = tl.arange(0, DIM_PADDED)
    is_dim = dims < HEAD_DIM
    members = tl.arange(0, GROUP_PADDED)
    is_member = members < GROUP
    heads = head * GROUP + members
    is_out = is_member[:, None] & is_dim[None, :]
    for row in range(first_row, tl.minimum(last_row + 1, num_rows)):
        position = tl.load(positions + row)
        length = position + 1  # 0 in a padding row
        num_tiles = tl.cdiv(length, BLOCK_N)
        first_tile = tl.where(row == first_row, first_row_tile, 0)
        end_tile = tl.where(row == last_row, last_row_tile, num_tiles)
        if first_tile < end_tile:
            row_table = table + tl.load(slots + row).to(tl.int64) * table_stride
            if end_tile == num_tiles:
                block = tl.load(row_table + position // BLOCK_SIZE).to(tl.int64)
                place = kv + block * kv_stride_block + (position % BLOCK_SIZE) * kv_stride_token + head * HEAD_DIM + dims
                new_key = tl.load(key + row * key_stride_token + head * key_stride_head + dims, mask=is_dim)
                new_value = tl.load(value + row * value_stride_token + head * value_stride_head + dims, mask=is_dim)
                tl.store(place, new_key, mask=is_dim)
                tl.store(place + kv_stride_value, new_value, mask=is_dim)
            tl.debug_barrier()  # the loop below reads what was just written
            q = tl.load(
                query + row * query_stride_token + heads[:, None] * query_stride_head + dims[None, :],
                mask=is_out,
                other=0.0,
            )
            largest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
            total = tl.zeros([GROUP_PADDED], tl.float32)
            result = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
            for first in range(first_tile * BLOCK_N, tl.minimum(end_tile * BLOCK_N, length), BLOCK_N):
                tokens = first + tl.arange(0, BLOCK_N)
                is_token = tokens < length
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
            result = result / total[:, None]
            if (first_tile == 0) & (end_tile == num_tiles):
                places_out = (row * num_heads + heads[:, None]) * HEAD_DIM + dims[None, :]
                tl.store(out + places_out, result.to(out.dtype.element_ty), mask=is_out)
            else:
                # A group has at most one part of a row that began before it, and one of a row that goes on behind it.
                index = (group * 2 + (first_tile == 0).to(tl.int32)) * num_heads + heads
                tl.store(lse + index, largest + tl.log2(total), mask=is_member)
                tl.store(partial + index[:, None] * HEAD_DIM + dims[None, :], result, mask=is_out)


@triton.jit
def _weigh_parts(
    out,
    partial,
    lse,
    shares,
    NUM_GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
) -> None:
    """For the first border between groups that lies within a row: the row's output from its parts."""
    before, head = tl.program_id(0), tl.program_id(1)
    row, tile = tl.load(shares + before * 2 + 2), tl.load(shares + before * 2 + 3)
    row_before, tile_before = tl.load(shares + before * 2), tl.load(shares + before * 2 + 1)
    if (tile > 0) & ((row_before < row) | (tile_before == 0)):
        groups = tl.arange(0, GROUPS_PADDED)
        is_group = groups < NUM_GROUPS
        rows = tl.load(shares + groups * 2, mask=is_group, other=-1)
        tiles = tl.load(shares + groups * 2 + 1, mask=is_group, other=0)
        is_first = groups == before
        is_part = is_first | ((rows == row) & (tiles > 0))
        index = (groups * 2 + is_first.to(tl.int32)) * NUM_HEADS + head
        logs = tl.load(lse + index, mask=is_part, other=float("-inf"))
        weights = tl.exp2(logs - tl.max(logs, 0))
        dims = tl.arange(0, DIM_PADDED)
        is_dim = dims < HEAD_DIM
        parts = tl.load(
            partial + index[:, None] * HEAD_DIM + dims[None, :], mask=is_part[:, None] & is_dim[None, :], other=0.0
        )
        result = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
        tl.store(out + (row * NUM_HEADS + head) * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=is_dim)


def keys_at_once(kv_dtype: torch.dtype, head_dim: int) -> int:
    """Tokens of a tile."""
    return 32 if kv_dtype.itemsize > 2 or head_dim > 128 else 64


def num_groups_for(num_kv_heads: int, num_processors: int) -> int:
    """Groups of num_kv_heads programs each that keep all processors busy."""
    return max(1, min(_MAX_GROUPS, _PROGRAMS_A_PROCESSOR * num_processors // num_kv_heads))


# So many fit a processor at once with a tile of 64 keys of 128 16-bit numbers.
_PROGRAMS_A_PROCESSOR = 3


def share_out(positions: torch.Tensor, num_groups: int, tile_len: int) -> torch.Tensor:
    """Where each group's share of the rows' tiles begins and, behind the last group, where all end: int32 [G + 1, 2].

    positions: int32 [R], -1 for a padding row. tile_len: as `keys_at_once` has it. The same for all layers of a step.
    Does not block.
    """
    shares = torch.empty(num_groups + 1, 2, dtype=torch.int32, device=positions.device)
    padded = triton.next_power_of_2(max(positions.shape[0], 2))
    _share_out[(num_groups + 1,)](
        positions, shares, positions.shape[0], NUM_GROUPS=num_groups, ROWS_PADDED=padded, BLOCK_N=tile_len
    )
    return shares


def paged_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    shares: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    tile: tuple[int, int, int] | None = None,
) -> None:
    """Write each row's k and v into the pool, then attend over positions 0..position of its slot's blocks.

    query [R, num_heads, head_dim]; key, value [R, num_kv_heads, head_dim]; any strides but the last. kv: one layer's
    view [num_blocks, 2, block_size, num_kv_heads, head_dim], contiguous but for the first. table: int64 [num_slots,
    max_blocks]; slots, positions: int32 [R], position -1 for a padding row: it writes nothing, and its output is left
    as it is. shares: as `share_out` gives it for these positions. out: contiguous [R, num_heads, head_dim].
    tile: keys at once (as in share_out), warps and stages of a program, for measurements.
    Mutates kv and out. Does not block.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv.shape[3], kv.shape[2]
    group = num_heads // num_kv_heads
    num_groups = shares.shape[0] - 1
    partial = torch.empty(2 * num_groups, num_heads, head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(2 * num_groups, num_heads, dtype=torch.float32, device=query.device)
    block_n, num_warps, num_stages = tile or (keys_at_once(kv.dtype, head_dim), 4, 2)
    constants: dict[str, Any] = {"HEAD_DIM": head_dim, "DIM_PADDED": triton.next_power_of_2(head_dim)}
    _attend_share[(num_groups * num_kv_heads,)](
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
        shares,
        num_rows,
        scale * _LOG2_E,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv.stride(0),
        table.stride(0),
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
    if num_groups > 1:
        _weigh_parts[(num_groups - 1, num_heads)](
            out,
            partial,
            lse,
            shares,
            NUM_GROUPS=num_groups,
            GROUPS_PADDED=triton.next_power_of_2(num_groups),
            NUM_HEADS=num_heads,
            num_warps=4,
            **constants,
        )
