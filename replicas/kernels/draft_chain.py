"""A draft behind the other: what is drawn at one place of each row is kept, and fed at the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_ROWS = 64  # of a program


class ChainPlace(NamedTuple):
    """What is fed next of each row, and where. ids: int64 [R]; places: int32 [2 * R], slots, then positions, -1 where
    the row's chain is over. lengths: int32 [R], positions that the next draw is behind, -1 likewise."""

    ids: torch.Tensor
    places: torch.Tensor
    lengths: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        return self.places[len(self.ids) :]


@triton.jit(
    do_not_specialize=["num_rows", "place", "drafts_stride"], do_not_specialize_on_alignment=["slots", "wanted"]
)
def _go_on(
    tokens, slots, wanted, lengths, drafts, ahead, ids, places, next_lengths, num_rows, place, drafts_stride,
    AHEAD_STRIDE: tl.constexpr, KEEPS_AHEAD: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    slot = tl.load(slots + row, mask=is_row, other=0)
    most = tl.load(wanted + row, mask=is_row, other=0)
    length = tl.load(lengths + row, mask=is_row, other=-1)
    token = tl.load(tokens + row, mask=is_row, other=-1)
    is_draft = (length >= 0) & (token >= 0) & (place < most)
    tl.store(drafts + row * drafts_stride + place, tl.where(is_draft, token, -1), mask=is_row)
    is_fed = is_draft & (place + 1 < most)
    tl.store(ids + row, tl.where(is_fed, token, 0), mask=is_row)
    tl.store(places + row, slot, mask=is_row)
    tl.store(places + num_rows + row, tl.where(is_fed, length + SHIFT, -1), mask=is_row)
    tl.store(next_lengths + row, tl.where(is_fed, length + 1, -1), mask=is_row)
    if KEEPS_AHEAD:
        tl.store(ahead + slot.to(tl.int64) * AHEAD_STRIDE + place, token, mask=is_row & is_fed)


def go_on(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    wanted: torch.Tensor,
    lengths: torch.Tensor,
    drafts: torch.Tensor,
    place: int,
    shift: int,
    ahead: torch.Tensor | None = None,
) -> ChainPlace:
    """tokens: int64 [R], drawn for this place of the chains, counted from 0, negative: none. slots, wanted, lengths:
    int32 [R]; wanted: drafts of a row in all. lengths: positions that was drawn behind, -1: the row has no draft here,
    nor further on. shift: of the position that a draft is fed at, over that. Mutates drafts, int64 [R, n], there; and
    ahead, of slots: drafts that are fed. Does not block."""
    num_rows = tokens.shape[0]
    ids = torch.empty(num_rows, dtype=torch.int64, device=tokens.device)
    places = torch.empty(2 * num_rows, dtype=torch.int32, device=tokens.device)
    next_lengths = torch.empty(num_rows, dtype=torch.int32, device=tokens.device)
    _go_on[(triton.cdiv(num_rows, _ROWS),)](
        tokens, slots, wanted, lengths, drafts, drafts if ahead is None else ahead, ids, places, next_lengths, num_rows,
        place, drafts.stride(0), AHEAD_STRIDE=0 if ahead is None else ahead.stride(0), KEEPS_AHEAD=ahead is not None,
        SHIFT=shift, ROWS=_ROWS, num_warps=2,
    )  # fmt: skip
    return ChainPlace(ids, places, next_lengths)
