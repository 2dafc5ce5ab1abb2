"""Between the projections and attention: norms of the heads, rotary positions, k and v into the pool; one kernel.

A compiler makes two to four kernels of it, and slow ones of norms over 128 numbers: 45 us a layer for 2,048 tokens of
Qwen3-0.6B; reading and writing take 8. Where `paged_decode` stands alone, it does all of this.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, wait_for_earlier
from replicas.kernels.kv_write import round_to_fp8, token_place
from replicas.kernels.rotary_heads import HEADS_AT_ONCE, HeadNorms, HeadRotation, refuse_partial, rotated_heads
from replicas.stored_numbers import FP8


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "positions"])
def _rotate(
    projected, cos, sin, query_weight, key_weight, epsilon, by_key_scale, by_value_scale, query, key, value, kv, table,
    slots, positions, num_rows, projected_stride, kv_stride_block, table_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, HEADS_AT_ONCE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_NORMS: tl.constexpr, COPIES_VALUE: tl.constexpr, ROUNDS: tl.constexpr, IS_EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One token, some of its heads: those of q, then k, then v."""
    wait_for_earlier(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    dims = tl.arange(0, DIM_PADDED)
    is_dim = dims < HEAD_DIM
    is_query, is_value = heads < NUM_HEADS, heads >= NUM_HEADS + NUM_KV_HEADS
    is_head = heads < NUM_HEADS + 2 * NUM_KV_HEADS
    mask = is_head[:, None] & is_dim[None, :]
    rows = projected + token * projected_stride + heads[:, None] * HEAD_DIM
    given, rotated = rotated_heads(
        rows, mask, dims, is_query, cos + token * HEAD_DIM, sin + token * HEAD_DIM, query_weight, key_weight, epsilon,
        HEAD_DIM, HAS_NORMS,
    )  # fmt: skip
    is_key = is_head & (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    if ROUNDS:
        rounded_key = round_to_fp8(rotated.to(tl.float32) * by_key_scale).to(given.dtype)
        rotated = tl.where(is_key[:, None], rounded_key, rotated)
        given = round_to_fp8(given.to(tl.float32) * by_value_scale).to(given.dtype)
    key_mask, value_mask = is_key[:, None] & is_dim[None, :], is_value[:, None] & mask
    query_places = (token * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(query + query_places, rotated, mask=is_query[:, None] & is_dim[None, :])
    in_key, in_value = heads - NUM_HEADS, heads - NUM_HEADS - NUM_KV_HEADS
    tl.store(key + (token * NUM_KV_HEADS + in_key)[:, None] * HEAD_DIM + dims[None, :], rotated, mask=key_mask)
    if COPIES_VALUE:
        places = (token * NUM_KV_HEADS + in_value)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(value + places, given, mask=value_mask)
    position = tl.load(positions + token)
    if (token >= num_rows) & (position >= 0):
        slot = tl.load(slots + token).to(tl.int64)
        place = token_place(
            kv, table + slot * table_stride, position, kv_stride_block, NUM_KV_HEADS * HEAD_DIM, BLOCK_SIZE
        )
        stored = kv.dtype.element_ty
        tl.store(place + in_key[:, None] * HEAD_DIM + dims[None, :], rotated.to(stored), mask=key_mask)
        place += BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM
        tl.store(place + in_value[:, None] * HEAD_DIM + dims[None, :], given.to(stored), mask=value_mask)


def rotate_into_pool(
    projected: torch.Tensor,
    norms: HeadNorms | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    num_rows: int,
    *,
    copies_value: bool,
    scales: tuple[float, float] = (1.0, 1.0),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k with norms and rotary positions, and v: [T, heads, head_dim] each, v a view unless copies_value, or the
    pool is one of FP8: then k and v, of the rows too, are what it stores, each number divided by its scale and rounded.

    projected: [T, (num_heads + 2 * num_kv_heads) * head_dim], q then k then v; cos, sin: [T, head_dim], contiguous. kv
    and table as in `paged_decode`; slots, positions: int32 [T]. k and v of all tokens but the first num_rows, and but
    those at position -1, are written to the pool. Computes in float32. Mutates kv. Does not block. Raises ValueError
    where positions rotate only a part of a head. scales: of keys and values.
    """
    num_tokens = projected.shape[0]
    _, _, block_size, num_kv_heads, head_dim = kv.shape
    refuse_partial(cos, num_tokens, head_dim)
    num_heads = projected.shape[1] // head_dim - 2 * num_kv_heads
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=projected.dtype, device=projected.device)
    key = torch.empty(num_tokens, num_kv_heads, head_dim, dtype=projected.dtype, device=projected.device)
    rounds = kv.dtype is FP8
    if copies_value or rounds:
        value = torch.empty_like(key)
    else:
        value = projected[:, (num_heads + num_kv_heads) * head_dim :].unflatten(1, (num_kv_heads, head_dim))
    is_early = launches_early(projected.device)
    _rotate[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS_AT_ONCE))](
        projected, *HeadRotation(cos, sin, norms).arguments(), 1.0 / scales[0], 1.0 / scales[1], query, key, value, kv,
        table, slots, positions, num_rows, projected.stride(0), kv.stride(0), table.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, DIM_PADDED=triton.next_power_of_2(head_dim), HEADS_AT_ONCE=HEADS_AT_ONCE,
        BLOCK_SIZE=block_size, HAS_NORMS=norms is not None, COPIES_VALUE=copies_value or rounds,
        ROUNDS=rounds, num_warps=4, IS_EARLY=is_early, launch_pdl=is_early,
    )  # fmt: skip
    return query, key, value
