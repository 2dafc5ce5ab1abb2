"""Writes k and v of a step's prompt tokens into the paged pool. (`paged_decode` writes those of decode rows, with what
is here.)

Numbers come as the pool stores them, in whatever type: `round_to_fp8` is for who rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def token_place(kv, row_table, position, kv_stride_block, TOKEN_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Pointer to the keys of a position, TOKEN_SIZE numbers; its values lie BLOCK_SIZE * TOKEN_SIZE behind. kv as in
    `paged_decode`; row_table: pointer to the blocks of its sequence."""
    block = tl.load(row_table + position // BLOCK_SIZE).to(tl.int64)
    return kv + block * kv_stride_block + (position % BLOCK_SIZE) * TOKEN_SIZE


@triton.jit
def write_token(
    key, value, kv, row_table, position, row, head, dims, is_dim, key_stride_token, key_stride_head,
    value_stride_token, value_stride_head, kv_stride_block,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """A head's new key and value, of row's only query."""
    kv_stride_token: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    kv_stride_value: tl.constexpr = BLOCK_SIZE * kv_stride_token
    stored = kv.dtype.element_ty
    token = token_place(kv, row_table, position, kv_stride_block, kv_stride_token, BLOCK_SIZE)
    place = token + head * HEAD_DIM + dims
    new_key = tl.load(key + row * key_stride_token + head * key_stride_head + dims, mask=is_dim)
    new_value = tl.load(value + row * value_stride_token + head * value_stride_head + dims, mask=is_dim)
    tl.store(place, new_key.to(stored), mask=is_dim)
    tl.store(place + kv_stride_value, new_value.to(stored), mask=is_dim)


@triton.jit
def write_tokens(
    key, value, kv, row_table, position, first_token, num_seen, head, dims, is_dim, key_stride_token, key_stride_head,
    value_stride_token, value_stride_head, kv_stride_block,
    QUERIES_PADDED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """A head's new keys and values, of every query that a query here sees, from first_token on. Another program writes
    the first ones too, the same."""
    kv_stride_token: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    kv_stride_value: tl.constexpr = BLOCK_SIZE * kv_stride_token
    stored = kv.dtype.element_ty
    queries = tl.arange(0, QUERIES_PADDED)
    token = token_place(
        kv, row_table, position + tl.minimum(queries, num_seen - 1), kv_stride_block, kv_stride_token, BLOCK_SIZE
    )
    news = first_token + queries
    place = token[:, None] + head * HEAD_DIM + dims[None, :]
    is_new = (queries < num_seen)[:, None] & is_dim[None, :]
    new_key = tl.load(key + news[:, None] * key_stride_token + head * key_stride_head + dims[None, :], mask=is_new)
    new_value = tl.load(
        value + news[:, None] * value_stride_token + head * value_stride_head + dims[None, :], mask=is_new
    )
    tl.store(place, new_key.to(stored), mask=is_new)
    tl.store(place + kv_stride_value, new_value.to(stored), mask=is_new)


@triton.jit
def round_to_fp8(x):
    """float32 -> float32: the nearest number of e4m3, ties to even; what is too large becomes the largest, 448, and
    what is no number stays none. As `as_stored`; by bits, as Triton's interpreter converts otherwise than a card."""
    limited = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = limited.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)  # to 3 bits of mantissa
    magnitude = tl.abs(limited)
    small = (magnitude + 16384.0) - 16384.0  # to multiples of 2**-9
    small = (small.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)  # of its sign
    rounded = tl.where(magnitude < 0.015625, small, normal)
    return tl.where(x == x, rounded, x)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _write_token(
    key,
    value,
    kv,
    table,
    slots,
    positions,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    kv_stride_block,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    if position >= 0:
        slot = tl.load(slots + token).to(tl.int64)
        heads = tl.arange(0, HEADS_PADDED)[:, None]
        dims = tl.arange(0, DIM_PADDED)[None, :]
        mask = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
        place = token_place(
            kv, table + slot * table_stride, position, kv_stride_block, NUM_KV_HEADS * HEAD_DIM, BLOCK_SIZE
        )
        inside = heads * HEAD_DIM + dims
        new_key = tl.load(key + token * key_stride_token + heads * key_stride_head + dims, mask=mask)
        new_value = tl.load(value + token * value_stride_token + heads * value_stride_head + dims, mask=mask)
        stored = kv.dtype.element_ty
        tl.store(place + inside, new_key.to(stored), mask=mask)
        tl.store(place + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM + inside, new_value.to(stored), mask=mask)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Write key, value [T, num_kv_heads, head_dim], any strides but the last, to positions [T] of slots [T], int32.

    kv and table as in `paged_decode`. Tokens at position -1 are padding. Mutates kv. Does not block.
    """
    num_kv_heads, head_dim = kv.shape[3], kv.shape[4]
    _write_token[(key.shape[0],)](
        key,
        value,
        kv,
        table,
        slots,
        positions,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv.stride(0),
        table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim,
        DIM_PADDED=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=kv.shape[2],
        num_warps=4,
    )
