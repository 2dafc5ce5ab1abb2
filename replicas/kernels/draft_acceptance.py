"""Behind the draw: which drafts are what was chosen there, and what the slots, and their histories, then go on with.

A draft counts if and only if it is the token that the model's own draw has chosen at its position. Of what a row has
chosen the first token counts, and each behind a draft that counts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from replicas.kernels.row_feed import FedRows
from replicas.kernels.slot_columns import HISTORY, LAST_TOKEN, LENGTH

_LAST_TOKEN, _LENGTH, _HISTORY = tl.constexpr(LAST_TOKEN), tl.constexpr(LENGTH), tl.constexpr(HISTORY)


class AcceptedRows(NamedTuple):
    """Of each row. counts: int32 [R, 2]: how many of its tokens count, how many drafts it had; 0, 0 of padding rows.
    tokens: int64 [R, most]: those that count, and some numbers behind them."""

    counts: torch.Tensor
    tokens: torch.Tensor


@triton.jit
def _remember(state_row, history, slot, tokens, count, history_stride, QUERIES: tl.constexpr):
    """The first `count` of tokens [QUERIES] follow in the slot, if a history of it is kept; so the last token moves."""
    number = tl.load(state_row + _HISTORY)
    if number > 0:
        queries = tl.arange(0, QUERIES)
        place = number + queries
        is_in = (queries < count) & (place < history_stride)
        tl.store(history + slot * history_stride + place, tokens.to(tl.int32), mask=is_in)
        tl.store(state_row + _HISTORY, number + count)
        length = tl.load(state_row + _LENGTH)
        tl.store(state_row + _LENGTH, tl.where(length >= 0, length + count, length))


@triton.jit
def _accept(
    tokens, ids, rows, state, history, counts, taken, state_stride, history_stride, MOST: tl.constexpr,
    QUERIES: tl.constexpr,
) -> None:  # fmt: skip
    """One row. QUERIES: MOST, padded."""
    row = tl.program_id(0)
    slot = tl.load(rows + row * 4).to(tl.int64)
    first, num_real = tl.load(rows + row * 4 + 1), tl.load(rows + row * 4 + 2)
    queries = tl.arange(0, QUERIES)
    chosen = tl.load(tokens + first + queries, mask=queries < num_real, other=-1)
    draft = tl.load(ids + first + queries + 1, mask=queries + 1 < num_real, other=-1)
    is_right = (queries + 1 < num_real) & (chosen == draft)
    accepted = tl.min(tl.where(is_right, QUERIES, queries), 0)
    count = tl.where(num_real > 0, accepted + 1, 0)
    # No token must still be some id: the next step may be planned already, and is dropped.
    fed = tl.maximum(chosen, 0)
    tl.store(counts + row * 2, count)
    tl.store(counts + row * 2 + 1, tl.maximum(num_real - 1, 0))
    tl.store(taken + row * MOST + queries, fed, mask=queries < MOST)
    if num_real > 0:
        state_row = state + slot * state_stride
        tl.store(state_row + _LAST_TOKEN, tl.sum(tl.where(queries == accepted, fed, 0), 0))
        _remember(state_row, history, slot, fed, count, history_stride, QUERIES)


@triton.jit(do_not_specialize_on_alignment=["tokens", "slots", "positions"])
def _follow(tokens, slots, positions, state, history, state_stride, history_stride) -> None:
    """One row of one token."""
    row = tl.program_id(0)
    if tl.load(positions + row) >= 0:
        slot = tl.load(slots + row).to(tl.int64)
        token = tl.maximum(tl.load(tokens + row + tl.arange(0, 1)), 0)
        _remember(state + slot * state_stride, history, slot, token, 1, history_stride, 1)


def accept_drafts(
    tokens: torch.Tensor, fed: FedRows, state: torch.Tensor, history: torch.Tensor
) -> AcceptedRows:  # fmt: skip
    """Which tokens count of rows that were fed so. Mutates state: the slots' last tokens, lengths and numbers of kept
    tokens; and history: int32 [as many rows as state, any width].

    tokens: int64, as `draw_tokens` gives them for the logits of fed.ids, or the first ones of them that real tokens
    have. Does not block.
    """
    num_rows = fed.rows.shape[0]
    counts = torch.empty(num_rows, 2, dtype=torch.int32, device=state.device)
    taken = torch.empty(num_rows, fed.most, dtype=torch.int64, device=state.device)
    _accept[(num_rows,)](
        tokens, fed.ids, fed.rows, state, history, counts, taken, state.stride(0), history.stride(0), MOST=fed.most,
        QUERIES=triton.next_power_of_2(fed.most), num_warps=1,
    )  # fmt: skip
    return AcceptedRows(counts, taken)


def follow_tokens(
    tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, state: torch.Tensor, history: torch.Tensor
) -> None:
    """The same for rows of one token each, int64 [R], which count. Their slots have them as last tokens already.

    slots, positions: int32 [R], -1: padding; slots of others differ. Mutates state and history. Does not block.
    """
    _follow[(tokens.shape[0],)](
        tokens, slots, positions, state, history, state.stride(0), history.stride(0), num_warps=1
    )  # fmt: skip
