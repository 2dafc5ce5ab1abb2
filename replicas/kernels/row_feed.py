"""What a step with drafts feeds: each row's last token and drafts, at the positions where its slot is by now.

The host knows neither while the steps in front are in flight: how many of their drafts count moves the slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from replicas.kernels.slot_columns import LAST_TOKEN, LENGTH

_LAST_TOKEN, _LENGTH = tl.constexpr(LAST_TOKEN), tl.constexpr(LENGTH)
_TOKENS = 64  # of a program


@triton.jit
def position_of(state_row, planned):
    """Where the slot's last token is, int32; -1 in padding. planned: where the plan says, at most; -1: padding."""
    length = tl.load(state_row + _LENGTH).to(tl.int32)
    return tl.where((planned >= 0) & (length >= 0), length, planned)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "planned"])
def _locate(state, slots, planned, ids, places, num_rows, state_stride, ROWS: tl.constexpr) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    slot = tl.load(slots + row, mask=is_row, other=0)
    state_row = state + slot.to(tl.int64) * state_stride
    tl.store(ids + row, tl.load(state_row + _LAST_TOKEN), mask=is_row)
    tl.store(places + row, slot, mask=is_row)
    position = position_of(state_row, tl.load(planned + row, mask=is_row, other=-1))
    tl.store(places + num_rows + row, position, mask=is_row)


def locate_rows(state: torch.Tensor, slots: torch.Tensor, planned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows of one token: last tokens, int64 [R], and places, int32 [2 * R], the slots, then where they are.

    state: as in `draw_tokens`; slots, planned: int32 [R], planned the plan's positions, -1: padding. Does not block.
    """
    num_rows = slots.shape[0]
    ids = torch.empty(num_rows, dtype=torch.int64, device=state.device)
    places = torch.empty(2 * num_rows, dtype=torch.int32, device=state.device)
    _locate[(triton.cdiv(num_rows, _TOKENS),)](
        state, slots, planned, ids, places, num_rows, state.stride(0), ROWS=_TOKENS
    )  # fmt: skip
    return ids, places


class PlannedRows(NamedTuple):
    """Rows of some tokens each, side by side, as the plan has them. int32 [R]; slots of padding rows are any.

    planned: positions of their first tokens, at most; -1: padding. choices: of their requests. firsts: of their tokens
    the first ones. counts: of tokens: one more than there may be drafts. of_token: int32 [T], each token's row; -1:
    padding. most: the largest count there can be.
    """

    slots: torch.Tensor
    planned: torch.Tensor
    choices: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    of_token: torch.Tensor
    most: int

    @classmethod
    def split(cls, columns: torch.Tensor, num_rows: int, most: int) -> PlannedRows:
        """Of all columns one behind the other, in this order: int32 [5 * R + T]."""
        slots, planned, choices, firsts, counts = columns[: 5 * num_rows].view(5, num_rows)
        return cls(slots, planned, choices, firsts, counts, columns[5 * num_rows :], most)


class FedRows(NamedTuple):
    """The same rows as they are computed. ids: int64 [T], 0 in padding, which drafts that there are none of are too;
    places: int32 [2 * T], slots, then positions, -1 in padding. choices: int32 [T]. firsts: int32 [R], positions of the
    rows' first tokens. shares: a WorkSharing's, that has rows in it as RowQueries says; rows: these, int32 [R, 4].
    most: as in PlannedRows."""

    ids: torch.Tensor
    places: torch.Tensor
    choices: torch.Tensor
    firsts: torch.Tensor
    shares: torch.Tensor
    rows: torch.Tensor
    most: int

    def copied(self) -> FedRows:
        ids, places, choices, firsts, shares, rows = (tensor.clone() for tensor in self[:-1])
        return FedRows(ids, places, choices, firsts, shares, rows, self.most)

    @property
    def slots(self) -> torch.Tensor:
        return self.places[: len(self.ids)]

    @property
    def positions(self) -> torch.Tensor:
        return self.places[len(self.ids) :]


@triton.jit
def _num_drafts(drafts, row, planned_count, drafts_stride, NUM_COLUMNS: tl.constexpr):
    """How many of a row's drafts are some, before the first that is none."""
    count = planned_count - planned_count
    is_open = planned_count > 0
    for column in tl.static_range(NUM_COLUMNS):
        is_in = is_open & (column + 1 < planned_count)
        draft = tl.load(drafts + row * drafts_stride + column, mask=is_in, other=-1)
        is_open = is_in & (draft >= 0)
        count += is_open.to(tl.int32)
    return count


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "drafts_stride"],
    do_not_specialize_on_alignment=["drafts", "slots", "planned", "choices", "firsts", "counts", "of_token"],
)
def _feed(
    state, drafts, slots, planned, choices, firsts, counts, of_token, ids, places, token_choices, row_positions, rows,
    num_rows, num_tokens, padding_slot, state_stride, drafts_stride, NUM_COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """Programs of tokens, then those of rows."""
    program, num_of_tokens = tl.program_id(0), tl.cdiv(num_tokens, TOKENS)
    if program < num_of_tokens:
        token = program * TOKENS + tl.arange(0, TOKENS)
        is_token = token < num_tokens
        row = tl.load(of_token + token, mask=is_token, other=-1)
        is_fed = row >= 0
        slot = tl.load(slots + row, mask=is_fed, other=padding_slot)
        state_row = state + slot.to(tl.int64) * state_stride
        number = token - tl.load(firsts + row, mask=is_fed, other=0)
        position = position_of(state_row, tl.load(planned + row, mask=is_fed, other=-1))
        count = tl.load(counts + row, mask=is_fed, other=0)
        is_draft = is_fed & (number > 0) & (number <= _num_drafts(drafts, row, count, drafts_stride, NUM_COLUMNS))
        draft = tl.load(drafts + row * drafts_stride + number - 1, mask=is_draft, other=0)
        is_real = (position >= 0) & (is_draft | (number == 0))
        last = tl.load(state_row + _LAST_TOKEN, mask=is_token, other=0)
        tl.store(ids + token, tl.where(number == 0, tl.where(is_real, last, 0), draft), mask=is_token)
        tl.store(places + token, slot, mask=is_token)
        tl.store(places + num_tokens + token, tl.where(is_real, position + number, -1), mask=is_token)
        tl.store(token_choices + token, tl.load(choices + row, mask=is_fed, other=0), mask=is_token)
    else:
        row = (program - num_of_tokens) * TOKENS + tl.arange(0, TOKENS)
        is_row = row < num_rows
        slot = tl.load(slots + row, mask=is_row, other=padding_slot)
        position = position_of(
            state + slot.to(tl.int64) * state_stride, tl.load(planned + row, mask=is_row, other=-1)
        )  # fmt: skip
        count = tl.load(counts + row, mask=is_row, other=0)
        real = tl.where(position >= 0, 1 + _num_drafts(drafts, row, count, drafts_stride, NUM_COLUMNS), 0)
        tl.store(row_positions + row, position, mask=is_row)
        tl.store(rows + row * 4, slot, mask=is_row)
        tl.store(rows + row * 4 + 1, tl.load(firsts + row, mask=is_row, other=0), mask=is_row)
        tl.store(rows + row * 4 + 2, real, mask=is_row)
        tl.store(rows + row * 4 + 3, position, mask=is_row)


def feed_rows(
    state: torch.Tensor, planned: PlannedRows, drafts: torch.Tensor, shares: torch.Tensor, rows_at: int
) -> FedRows:
    """state: as in `draw_tokens`, its last line that of padding. drafts: int64 [R or more, most - 1], negative from
    where there are none. shares: int32 [rows_at + R or more, 4], written from line rows_at on. Does not block."""
    num_rows, num_tokens = planned.slots.shape[0], planned.of_token.shape[0]
    rows = shares[rows_at : rows_at + num_rows]
    ids = torch.empty(num_tokens, dtype=torch.int64, device=state.device)
    places = torch.empty(2 * num_tokens, dtype=torch.int32, device=state.device)
    choices = torch.empty(num_tokens, dtype=torch.int32, device=state.device)
    firsts = torch.empty(num_rows, dtype=torch.int32, device=state.device)
    _feed[(triton.cdiv(num_tokens, _TOKENS) + triton.cdiv(num_rows, _TOKENS),)](
        state, drafts, planned.slots, planned.planned, planned.choices, planned.firsts, planned.counts,
        planned.of_token, ids, places, choices, firsts, rows, num_rows, num_tokens, state.shape[0] - 1, state.stride(0),
        drafts.stride(0), NUM_COLUMNS=planned.most - 1, TOKENS=_TOKENS,
    )  # fmt: skip
    return FedRows(ids, places, choices, firsts, shares, rows, planned.most)
