"""Decode attention over the paged pool: one or a few queries per sequence, its context cut into pieces of like length.

The algorithm is flash-decoding (Dao et al., "Flash-Decoding for long-context inference", 2023): each program attends
over one piece of one sequence's keys and keeps a running softmax (Milakov and Gimelshein, 2018); then pieces are
weighed by their log-sum-exp (`piece_weighing`). How long a piece may be follows from all contexts of the step, so that
neither one long context nor a last wave of programs holds up the rest (the aim of Sanovar et al., "Lean Attention",
2024). The heads that share a KV head are the rows of one matrix product, so K and V are read once. The program of a
row's last piece writes its new k and v first: no kernel of its own for that. Where it `stands_alone`, nor for norms and
rotary positions: each program rotates its queries, that of the last piece the new key too; nor for weighing pieces.

A sequence's queries (its last token, and drafts behind it) are more rows of that product, which has room for them: a
product has 16 rows at least, and a KV head 4 or 8 heads. Pieces are those of the first query alone, the last one with
the drafts' keys behind it, so each query's sums are those that it would have alone, in the same order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, let_next_in, wait_for_earlier
from replicas.kernels.kv_write import write_token, write_tokens
from replicas.kernels.piece_attention import attend_keys
from replicas.kernels.piece_weighing import store_piece, weigh_if_last, weigh_pieces
from replicas.kernels.pool_numbers import is_compiled
from replicas.kernels.rotary_heads import HeadRotation, refuse_partial
from replicas.kernels.row_rotation import rotate_row
from replicas.stored_numbers import FP8

_LOG2_E = 1.4426950408889634
# Rows of one product. With 64 the compiler takes another instruction, whose sums are others than those of 16 and of 32.
_MOST_MEMBERS = 32
_MOST_HEADS_ALONE = 4
_FEWEST_PAIRED = 32  # dimensions of a head: a product of the matrix units has 16 at least


class RowQueries(NamedTuple):
    """Rows of several queries: at most `most` each, num_rows of them. What they are stands in `shares` too, from line
    rows_at on: slot, first query, how many there are (0: a padding row), position of the first; the others' positions
    are those behind it.
    """

    most: int
    num_rows: int
    rows_at: int


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _attend_piece(
    query, key, value, kv, words, out, partial, lse, table, slots, positions, shares, scale_log2, query_stride_token,
    query_stride_head, key_stride_token, key_stride_head, value_stride_token, value_stride_head, kv_stride_block,
    word_stride_block, table_stride, num_numbers, cos, sin, query_weight, key_weight, epsilon,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, QUERIES: tl.constexpr,
    QUERIES_AT_ONCE: tl.constexpr, QUERIES_PADDED: tl.constexpr, MEMBERS_PADDED: tl.constexpr, ROWS_AT: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, IS_COMPILED: tl.constexpr, IS_PAIRED: tl.constexpr, ROTATES: tl.constexpr,
    HAS_NORMS: tl.constexpr, WEIGHS: tl.constexpr, IS_EARLY: tl.constexpr, LETS_IN: tl.constexpr,
) -> None:  # fmt: skip
    """IS_PAIRED: numbers of the pool are read two in a word, the even dimensions apart from the odd ones. num_numbers:
    of shares. ROTATES: queries, keys and values are those of the projection. WEIGHS: the last one of a row's pieces
    weighs them; else a kernel behind this one does. LETS_IN: the next kernel at the beginning, whose programs take
    little room, or read weights before they wait; else at the end."""
    wait_for_earlier(IS_EARLY, LETS_IN)
    piece, head, first_query = _place_of_program(NUM_KV_HEADS, QUERIES, QUERIES_AT_ONCE)
    row, start, end, first_token, count = _piece_span(shares, piece, first_query, QUERIES, ROWS_AT, BLOCK_N)
    if start < end:
        slot, position = _place_of_row(slots, positions, shares, row, QUERIES, ROWS_AT)
        is_last = end > position
        end = tl.minimum(end, position + 1)
        dims = tl.arange(0, DIM_PADDED)
        is_dim = dims < HEAD_DIM
        row_table = table + slot * table_stride
        if WEIGHS:
            first_piece, end_piece = tl.load(shares + row * 4 + 3), tl.load(shares + row * 4 + 7)
        is_member, heads, query_of, token_of, q_rows = _queries(
            query, head, first_token, first_query, count, query_stride_token, query_stride_head, GROUP, QUERIES,
            QUERIES_AT_ONCE, MEMBERS_PADDED,
        )  # fmt: skip
        rotated = None
        if ROTATES:
            rotated = rotate_row(
                q_rows, key, value, kv, row_table, position, row, head, is_member, is_last, dims, is_dim,
                key_stride_token, key_stride_head, value_stride_token, value_stride_head, kv_stride_block, cos, sin,
                query_weight, key_weight, epsilon, GROUP, MEMBERS_PADDED, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, HAS_NORMS,
            )  # fmt: skip
        elif is_last:
            end = _write_new(
                key, value, kv, row_table, position, first_token, first_query, count, end, head, dims, is_dim,
                key_stride_token, key_stride_head, value_stride_token, value_stride_head, kv_stride_block,
                QUERIES, QUERIES_AT_ONCE, QUERIES_PADDED, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
            )  # fmt: skip
        tl.debug_barrier()  # below is read what was just written
        seen = tl.minimum(position + query_of, end - 1)
        result, largest, total = attend_keys(
            q_rows, rotated, is_member, seen, dims, is_dim, kv, kv_stride_block, words, word_stride_block, row_table,
            head, start, end, scale_log2, QUERIES, MEMBERS_PADDED, NUM_KV_HEADS, HEAD_DIM, DIM_PADDED, BLOCK_SIZE,
            BLOCK_N, PRECISION, IS_COMPILED, IS_PAIRED,
        )  # fmt: skip
        if not LETS_IN:
            let_next_in(IS_EARLY)
        store_piece(
            out, partial, lse, result, largest, total, piece, query_of, token_of, heads, is_member, dims, is_dim,
            start, is_last, QUERIES, NUM_KV_HEADS * GROUP, HEAD_DIM,
        )  # fmt: skip
        if WEIGHS:
            weigh_if_last(
                out, partial, lse, shares, num_numbers, row, head, first_piece, end_piece, dims, is_dim, NUM_KV_HEADS,
                GROUP, GROUP_PADDED, HEAD_DIM,
            )  # fmt: skip


@triton.jit
def _place_of_program(NUM_KV_HEADS: tl.constexpr, QUERIES: tl.constexpr, QUERIES_AT_ONCE: tl.constexpr):
    """Piece, KV head, and of the piece's row the first query of those that this program attends for."""
    # Heads next to each other: their programs read the same blocks at about the same time.
    piece, head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    first_query = 0
    if QUERIES_AT_ONCE < QUERIES:
        num_parts: tl.constexpr = (QUERIES + QUERIES_AT_ONCE - 1) // QUERIES_AT_ONCE
        first_query, piece = piece % num_parts * QUERIES_AT_ONCE, piece // num_parts
    return piece, head, first_query


@triton.jit
def _piece_span(shares, piece, first_query, QUERIES: tl.constexpr, ROWS_AT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row, first key and the one behind the last: no keys where there is nothing to do. Then the row's first token
    among those of the step, and how many it has."""
    row = tl.load(shares + piece * 4)
    start = tl.load(shares + piece * 4 + 1) * BLOCK_N
    end = tl.load(shares + piece * 4 + 2) * BLOCK_N
    first_token, count = row, 1
    if QUERIES > 1:
        of_row = shares + (ROWS_AT + row) * 4
        first_token, count = tl.load(of_row + 1), tl.load(of_row + 2)
        end = tl.where(first_query < count, end, start)
    return row, start, end, first_token, count


@triton.jit
def _place_of_row(slots, positions, shares, row, QUERIES: tl.constexpr, ROWS_AT: tl.constexpr):
    """A row's slot, int64, and the position of its first query."""
    if QUERIES == 1:
        slot = tl.load(slots + row).to(tl.int64)
        position = tl.load(positions + row)
    else:
        of_row = shares + (ROWS_AT + row) * 4
        slot = tl.load(of_row).to(tl.int64)
        position = tl.load(of_row + 3)
    return slot, position


@triton.jit
def _write_new(
    key, value, kv, row_table, position, first_token, first_query, count, end, head, dims, is_dim, key_stride_token,
    key_stride_head, value_stride_token, value_stride_head, kv_stride_block,
    QUERIES: tl.constexpr, QUERIES_AT_ONCE: tl.constexpr, QUERIES_PADDED: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """A head's new keys and values, of the queries that are seen here. -> the position behind the last of them, which
    is `end` for a row of one query."""
    if QUERIES == 1:
        write_token(
            key, value, kv, row_table, position, first_token, head, dims, is_dim, key_stride_token, key_stride_head,
            value_stride_token, value_stride_head, kv_stride_block, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
    else:
        num_seen = tl.minimum(first_query + QUERIES_AT_ONCE, count)
        end = position + num_seen
        write_tokens(
            key, value, kv, row_table, position, first_token, num_seen, head, dims, is_dim, key_stride_token,
            key_stride_head, value_stride_token, value_stride_head, kv_stride_block, QUERIES_PADDED, NUM_KV_HEADS,
            HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
    return end


@triton.jit
def _queries(
    query, head, first_token, first_query, count, query_stride_token, query_stride_head,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, QUERIES_AT_ONCE: tl.constexpr, MEMBERS_PADDED: tl.constexpr,
):  # fmt: skip
    """The product's rows: which are some, their heads, queries among the row's, and tokens [members, 1]; pointers to
    them [members, 1]."""
    members = tl.arange(0, MEMBERS_PADDED)
    if QUERIES == 1:
        is_member = members < GROUP
        heads = head * GROUP + members
        query_of, token_of = 0, first_token
    else:
        query_of = first_query + members // GROUP
        is_member = (members < QUERIES_AT_ONCE * GROUP) & (query_of < count)
        heads = head * GROUP + members % GROUP
        token_of = (first_token + query_of)[:, None]
    q_rows = query + token_of * query_stride_token + heads[:, None] * query_stride_head
    return is_member, heads, query_of, token_of, q_rows


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
    rows: RowQueries | None = None,
    rotation: HeadRotation | None = None,
    num_warps: int = 4,
    num_stages: int | None = None,
) -> None:
    """Write each row's k and v into the pool, then attend over positions 0..position of its slot's blocks.

    query [R, num_heads, head_dim]; key, value [R, num_kv_heads, head_dim]; any strides but the last. kv: one layer's
    view [num_blocks, 2, block_size, num_kv_heads, head_dim], contiguous but for the first, in the query's type; or FP8,
    whose numbers are made the query's type before they are multiplied: then key and value are such numbers too. table:
    int64 [num_slots, max_blocks]; slots, positions: int32 [R], position -1 for a padding row: it writes nothing, and
    its output is left as it is. shares: as a WorkSharing gives it for these positions; num_pieces, tile_len: its
    `most_pieces` and `tile_len` of R; all of it, and nothing behind it, for one call at a time: where this
    `stands_alone`, pieces are counted at its end, in what is zeros before and afterwards. out: contiguous [R,
    num_heads, head_dim].
    rows: None, or how several queries are one row: then R is the number of queries, num_pieces, tile_len and shares are
    of the rows, by the positions of their first queries, and slots and positions are not looked at.
    rotation: what is to be done to query, key and value, as the projection gives them, where `stands_alone`: all
    becomes what `rotate_into_pool` would have made of it, to the bit. None: it is done.
    num_warps, num_stages: of a program, for measurements; None: as many as are the fastest.
    Mutates kv, out and those counts. Does not block. Raises ValueError where positions rotate only a part of a head.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv.shape[3], kv.shape[2]
    num_queries = rows.most if rows else 1
    weighs = num_queries == 1 and stands_alone(num_heads // num_kv_heads, kv.dtype)
    if rotation:
        refuse_partial(rotation.cos, len(query), head_dim)
        assert weighs, "rows that are rotated apart"
    sizes = query_sizes(num_heads // num_kv_heads, num_queries)
    num_parts = triton.cdiv(num_queries, sizes["QUERIES_AT_ONCE"])
    num_partial = num_pieces * num_queries
    partial = torch.empty(num_partial, num_heads, head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(num_partial, num_heads, dtype=torch.float32, device=query.device)
    is_early = launches_early(query.device)
    is_paired = kv.dtype is FP8 and query.itemsize == 2 and head_dim >= _FEWEST_PAIRED
    words = kv.view(torch.int16) if is_paired else kv
    num_stages = num_stages or (3 if is_paired else 2)
    constants: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "DIM_PADDED": triton.next_power_of_2(head_dim),
        "ROWS_AT": rows.rows_at if rows else 0,
        "IS_EARLY": is_early,
        "launch_pdl": is_early,
    }
    _attend_piece[(num_pieces * num_parts * num_kv_heads,)](
        query, key, value, kv, words, out, partial, lse, table, slots, positions, shares, scale * _LOG2_E,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1), kv.stride(0),
        words.stride(0), table.stride(0), shares.numel(), *(rotation.arguments() if rotation else [None] * 5),
        NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, BLOCK_N=tile_len, PRECISION="ieee",
        IS_COMPILED=is_compiled(query.device), IS_PAIRED=is_paired, ROTATES=rotation is not None,
        HAS_NORMS=bool(rotation and rotation.norms), WEIGHS=weighs, LETS_IN=not weighs or len(query) == 1,
        num_warps=num_warps, num_stages=num_stages, **sizes, **constants,
    )  # fmt: skip
    if not weighs:
        weigh_pieces(out, partial, lse, shares, rows.num_rows if rows else len(query), num_queries, constants)


def query_sizes(group: int, num_queries: int) -> dict[str, int]:
    """The attending kernel's constants. group: heads of a KV head.

    What is too much for one product is divided among programs, which find keys in the cache that another has read.
    """
    most = max(1, _MOST_MEMBERS // group)
    at_once = triton.cdiv(num_queries, triton.cdiv(num_queries, most))
    return {
        "GROUP": group,
        "GROUP_PADDED": triton.next_power_of_2(group),
        "QUERIES": num_queries,
        "QUERIES_AT_ONCE": at_once,
        "QUERIES_PADDED": triton.next_power_of_2(num_queries),
        "MEMBERS_PADDED": max(16, triton.next_power_of_2(group * at_once)),
    }


def stands_alone(group: int, stored: torch.dtype) -> bool:
    """Whether what attends for rows of one query, over a pool of this type, also rotates them and weighs their pieces:
    one kernel instead of three. group: heads of a KV head.

    On an H200 a step of 1, 16 and 64 rows of Llama-3.1-8B in fp8, over a pool of bfloat16, is 2, 4 and 5.5 % shorter by
    it, one of 128 and 256 rows in bfloat16 1.0 and 1.5 %. More were not measured. With eight heads of a KV head it
    lost (Llama-3.1-70B: 0.3 and 1.5 % at 1 and 16 rows); what reads a pool of FP8 in pairs does not rotate.
    """
    return group <= _MOST_HEADS_ALONE and stored is not FP8
