"""What a draft model reads next of each sequence, from slots' histories on the device: tokens that it has not read yet.

The host knows neither how many of the drafts in flight count nor, so, what of its KV is right: here it shows. A window
always ends the sequence, or as much of it as there is room for; with the last two tokens at least, the first of which
may have been read before: then the same is written once more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from replicas.kernels.slot_columns import HISTORY, LENGTH

_LENGTH, _HISTORY = tl.constexpr(LENGTH), tl.constexpr(HISTORY)


class DraftedKv(NamedTuple):
    """What a draft model's pool has of each slot. known: int64 [num_slots + 1], so many first tokens. ahead: int64
    [num_slots + 1, n], drafts that it was fed behind them, -1 from where there are none."""

    known: torch.Tensor
    ahead: torch.Tensor

    @classmethod
    def empty(cls, num_slots: int, num_ahead: int, device: torch.device) -> DraftedKv:
        known = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        return cls(known, torch.full((num_slots + 1, max(num_ahead, 1)), -1, dtype=torch.int64, device=device))


class WindowRows(NamedTuple):
    """Of R rows and windows of W tokens. ids: int64 [R * W], 0 in padding; places: int32 [2 * R * W], slots, then
    positions, -1 in padding. firsts: int32 [R], positions of the windows' first tokens. shares: a WorkSharing's, with
    rows in it as RowQueries says. last: int64 [R], where the windows' last tokens are. lengths: int32 [R], positions of
    the sequences' last tokens; -1 where the window does not reach them, or nothing is wanted."""

    ids: torch.Tensor
    places: torch.Tensor
    firsts: torch.Tensor
    shares: torch.Tensor
    last: torch.Tensor
    lengths: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        return self.places[len(self.ids) :]


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "wanted"])
def _open_window(
    state, history, known, ahead, slots, wanted, ids, places, firsts, rows, last, lengths, num_rows, state_stride,
    history_stride, VOCAB: tl.constexpr, NUM_AHEAD: tl.constexpr, WINDOW: tl.constexpr, WINDOW_PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """One row."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(state + slot * state_stride + _LENGTH)
    number = tl.load(state + slot * state_stride + _HISTORY)
    is_row = (tl.load(wanted + row) > 0) & (length >= 1) & (number > length)
    tokens = history + slot * history_stride + number - 1 - length  # of the sequence, without what is expected of it
    begun = tl.load(known + slot)
    # Of the drafts that it was fed those that count are read already.
    is_right = is_row
    first = begun
    for place in tl.static_range(NUM_AHEAD):
        fed = tl.load(ahead + slot * NUM_AHEAD + place)
        is_in = is_right & (begun + place <= length)
        token = tl.load(tokens + begun + place, mask=is_in, other=-1).to(tl.int64)
        is_right = is_in & (fed >= 0) & (fed == token)
        first += is_right.to(tl.int64)
        tl.store(ahead + slot * NUM_AHEAD + place, -1, mask=is_row)
    first = tl.where(is_row, tl.maximum(tl.minimum(first, length - 1), 0), 0)
    count = tl.where(is_row, tl.minimum(length + 1 - first, WINDOW), 0)
    tl.store(known + slot, first + count, mask=is_row)
    places_in = tl.arange(0, WINDOW_PADDED)
    is_token = places_in < count
    token = tl.load(tokens + first + places_in, mask=is_token, other=0).to(tl.int64)
    token = tl.where(token < VOCAB, token, 0)  # one that it does not know spoils drafts, not text
    out = row * WINDOW + places_in
    is_out = places_in < WINDOW
    tl.store(ids + out, token, mask=is_out)
    tl.store(places + out, slot.to(tl.int32), mask=is_out)
    position = tl.where(is_token, (first + places_in).to(tl.int32), -1)
    tl.store(places + num_rows * WINDOW + out, position, mask=is_out)
    at = tl.where(is_row, first, -1).to(tl.int32)
    tl.store(firsts + row, at)
    tl.store(rows + row * 4, slot.to(tl.int32))
    tl.store(rows + row * 4 + 1, row * WINDOW)
    tl.store(rows + row * 4 + 2, count.to(tl.int32))
    tl.store(rows + row * 4 + 3, at)
    tl.store(last + row, row * WINDOW + tl.maximum(count - 1, 0))
    tl.store(lengths + row, tl.where(is_row & (first + count > length), length, -1).to(tl.int32))


def open_windows(
    state: torch.Tensor,
    history: torch.Tensor,
    kv: DraftedKv,
    slots: torch.Tensor,
    wanted: torch.Tensor,
    window: int,
    vocab_size: int,
    shares: torch.Tensor,
    rows_at: int,
) -> WindowRows:
    """state, history: the served model's slots'. slots: int32 [R], that differ but for those of padding; wanted: int32
    [R], drafts, 0: padding. window: at least 2. vocab_size: of the draft model. shares: written from line rows_at on,
    as by `feed_rows`. Mutates kv: what the windows have is known from now on. Does not block."""
    num_rows, device = slots.shape[0], state.device

    def empty(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    ids, places, last = (
        empty(num_rows * window, torch.int64),
        empty(2 * num_rows * window),
        empty(num_rows, torch.int64),
    )
    firsts, lengths = empty(num_rows), empty(num_rows)
    _open_window[(num_rows,)](
        state, history, kv.known, kv.ahead, slots, wanted, ids, places, firsts, shares[rows_at:], last, lengths,
        num_rows, state.stride(0), history.stride(0), VOCAB=vocab_size, NUM_AHEAD=kv.ahead.shape[1], WINDOW=window,
        WINDOW_PADDED=triton.next_power_of_2(window), num_warps=1,
    )  # fmt: skip
    return WindowRows(ids, places, firsts, shares, last, lengths)
