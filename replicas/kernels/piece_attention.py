"""Attention of some queries over one piece of a sequence's keys in the paged pool, tile by tile: for `paged_decode`."""

from __future__ import annotations

import triton
import triton.language as tl

from replicas.kernels.pool_numbers import as_numbers, as_queries, pairs_as_numbers
from replicas.kernels.running_softmax import weights_of_tile


@triton.jit
def attend_keys(
    q_rows, rotated, is_member, seen, dims, is_dim, kv, kv_stride_block, words, word_stride_block, row_table, head,
    start, end, scale_log2,
    QUERIES: tl.constexpr, MEMBERS_PADDED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    IS_COMPILED: tl.constexpr, IS_PAIRED: tl.constexpr,
):  # fmt: skip
    """-> sums of values [members, DIM_PADDED], not yet divided by their weights; largest score and sum of weights.

    q_rows: pointers to the queries, [members, 1]; rotated: they themselves, or None; is_member: [members]; seen: of
    each the last position that it sees, for QUERIES beyond one. dims: of a head, is_dim: those that there are.
    row_table: pointer to the blocks of the sequence; its keys from start to end are looked at. words: kv as int16, for
    IS_PAIRED, which knows no rotated ones.
    """
    if IS_PAIRED:
        result, largest, total = _attend_pairs(
            q_rows, is_member, seen, words, word_stride_block, row_table, head, start, end, scale_log2,
            kv.dtype.element_ty, QUERIES, MEMBERS_PADDED, NUM_KV_HEADS, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, BLOCK_N,
            PRECISION, IS_COMPILED,
        )  # fmt: skip
    else:
        if rotated is None:
            q = tl.load(q_rows + dims[None, :], mask=is_member[:, None] & is_dim[None, :], other=0.0)
        else:
            q = rotated
        result, largest, total = _attend_numbers(
            q, seen, dims, is_dim, kv, kv_stride_block, row_table, head, start, end, scale_log2, QUERIES,
            MEMBERS_PADDED, NUM_KV_HEADS, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, BLOCK_N, PRECISION, IS_COMPILED,
        )  # fmt: skip
    return result, largest, total


@triton.jit
def _attend_numbers(
    q, seen, dims, is_dim, kv, kv_stride_block, row_table, head, start, end, scale_log2,
    QUERIES: tl.constexpr, MEMBERS_PADDED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    IS_COMPILED: tl.constexpr,
):  # fmt: skip
    """The pool's numbers one by one, in whatever type."""
    q = as_queries(q, kv.dtype.element_ty)
    result = tl.zeros([MEMBERS_PADDED, DIM_PADDED], tl.float32)
    largest = tl.full([MEMBERS_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS_PADDED], tl.float32)
    stride_token: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    of_head = head * HEAD_DIM + dims
    for first in range(start, end, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)
        is_token = tokens < end
        blocks = tl.load(row_table + tokens // BLOCK_SIZE, mask=is_token, other=0)
        places = blocks * kv_stride_block + (tokens % BLOCK_SIZE) * stride_token
        k = tl.load(
            kv + places[None, :] + of_head[:, None], mask=is_token[None, :] & is_dim[:, None], other=0.0
        )  # fmt: skip
        k = as_numbers(k, q.dtype, IS_COMPILED)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
        scores = _seen_scores(scores, tokens, is_token, seen, QUERIES)
        weights, shrink, largest = weights_of_tile(scores, largest, True)
        v = tl.load(
            kv + BLOCK_SIZE * stride_token + places[:, None] + of_head[None, :],
            mask=is_token[:, None] & is_dim[None, :], other=0.0,
        )  # fmt: skip
        v = as_numbers(v, q.dtype, IS_COMPILED)
        result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
    return result, largest, total


@triton.jit
def _attend_pairs(
    q_rows, is_member, seen, words, word_stride_block, row_table, head, start, end, scale_log2, STORED: tl.constexpr,
    QUERIES: tl.constexpr, MEMBERS_PADDED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    IS_COMPILED: tl.constexpr,
):  # fmt: skip
    """A pool of e4m3, read two numbers in a word, the even dimensions apart from the odd ones. words: it as int16.

    Where a tile is, is read while the one before it is computed: else each waits for memory twice. What is of 16 bits
    takes all of the memory's bandwidth as it is, and has no registers to spare.
    """
    num_words: tl.constexpr = DIM_PADDED // 2
    columns = tl.arange(0, num_words)
    is_column = columns < HEAD_DIM // 2
    is_q = is_member[:, None] & is_column[None, :]
    q = as_queries(tl.load(q_rows + 2 * columns[None, :], mask=is_q, other=0.0), STORED)
    q_odd = as_queries(tl.load(q_rows + 2 * columns[None, :] + 1, mask=is_q, other=0.0), STORED)
    result = tl.zeros([MEMBERS_PADDED, num_words], tl.float32)
    result_odd = tl.zeros([MEMBERS_PADDED, num_words], tl.float32)
    largest = tl.full([MEMBERS_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS_PADDED], tl.float32)
    stride_token: tl.constexpr = NUM_KV_HEADS * HEAD_DIM // 2
    of_head = head * (HEAD_DIM // 2) + columns
    tokens = start + tl.arange(0, BLOCK_N)
    later_blocks = tl.load(row_table + tokens // BLOCK_SIZE, mask=tokens < end, other=0)
    for first in range(start, end, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)
        is_token = tokens < end
        blocks, later = later_blocks, tokens + BLOCK_N
        later_blocks = tl.load(row_table + later // BLOCK_SIZE, mask=later < end, other=0)
        places = blocks * word_stride_block + (tokens % BLOCK_SIZE) * stride_token
        k = tl.load(words + places[None, :] + of_head[:, None], mask=is_token[None, :] & is_column[:, None], other=0)
        k_even, k_odd = pairs_as_numbers(k, IS_COMPILED)
        scores = tl.dot(q, k_even, input_precision=PRECISION)
        scores = tl.dot(q_odd, k_odd, scores, input_precision=PRECISION) * scale_log2
        scores = _seen_scores(scores, tokens, is_token, seen, QUERIES)
        weights, shrink, largest = weights_of_tile(scores, largest, True)
        v = tl.load(
            words + BLOCK_SIZE * stride_token + places[:, None] + of_head[None, :],
            mask=is_token[:, None] & is_column[None, :], other=0,
        )  # fmt: skip
        v_even, v_odd = pairs_as_numbers(v, IS_COMPILED)
        w = weights.to(q.dtype)
        result = result * shrink[:, None] + tl.dot(w, v_even, input_precision=PRECISION)
        result_odd = result_odd * shrink[:, None] + tl.dot(w, v_odd, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
    return tl.reshape(tl.join(result, result_odd), (MEMBERS_PADDED, DIM_PADDED)), largest, total


@triton.jit
def _seen_scores(scores, tokens, is_token, seen, QUERIES: tl.constexpr):
    """-inf of the keys that a query does not see: those behind the piece, and behind one of several queries."""
    is_seen = is_token[None, :] if QUERIES == 1 else tokens[None, :] <= seen[:, None]
    return tl.where(is_seen, scores, float("-inf"))
