"""A row's queries, new key and value, as they come from the projection: made ready by the program that attends over its
context, for `paged_decode`."""

from __future__ import annotations

import triton
import triton.language as tl

from replicas.kernels.kv_write import token_place
from replicas.kernels.rotary_heads import rotated_heads


@triton.jit
def rotate_row(
    q_rows, key, value, kv, row_table, position, token, head, is_member, is_last, dims, is_dim, key_stride_token,
    key_stride_head, value_stride_token, value_stride_head, kv_stride_block, cos, sin, query_weight, key_weight,
    epsilon,
    GROUP: tl.constexpr, MEMBERS_PADDED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """-> the queries of a KV head with norms and rotary positions, [members, dims]. Where is_last, its new key, rotated
    too, and its new value are written to the pool.

    q_rows: pointers to the queries, [members, 1]; is_member: [members], the first GROUP, behind which the product has a
    row that holds no query: the key is rotated there, by what rotates queries anyway. token: the row's, of the step.
    """
    tl.static_assert(GROUP < MEMBERS_PADDED, "no row of the product is left for the key")
    # All that is read is asked for before the first of it is waited for.
    token_size: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    place = token_place(kv, row_table, position, kv_stride_block, token_size, BLOCK_SIZE) + head * HEAD_DIM + dims
    of_value = value + token * value_stride_token + head * value_stride_head + dims
    new_value = tl.load(of_value, mask=is_dim & is_last, other=0.0)
    is_key = (tl.arange(0, MEMBERS_PADDED) == GROUP) & is_last
    rows = tl.where(is_key[:, None], key + token * key_stride_token + head * key_stride_head, q_rows)
    mask = (is_member | is_key)[:, None] & is_dim[None, :]
    _, rotated = rotated_heads(
        rows, mask, dims, is_member, cos + token * HEAD_DIM, sin + token * HEAD_DIM, query_weight, key_weight, epsilon,
        HEAD_DIM, HAS_NORMS,
    )  # fmt: skip
    if is_last:
        key_places = tl.broadcast_to(place[None, :], rotated.shape)
        tl.store(key_places, rotated, mask=is_key[:, None] & is_dim[None, :])
        tl.store(place + BLOCK_SIZE * token_size, new_value, mask=is_dim)
    return rotated
