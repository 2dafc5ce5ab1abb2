"""Drafts by n-grams, from slots' histories on the device: the rule of `replicas.speculation.ngram_drafter`.

Of each earlier place it is counted how many tokens up to there are those that the history ends with: the longest such
n-gram counts, and of several the most recent. A history of 32,768 tokens is 128 KiB, which one program reads in some
10 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.slot_columns import HISTORY

_HISTORY = tl.constexpr(HISTORY)
_PLACES = 2048  # that a program looks at at once


@triton.jit(do_not_specialize_on_alignment=["slots", "wanted"])
def _follow_ngram(
    history, state, slots, wanted, drafts, history_stride, state_stride, NGRAM_MIN: tl.constexpr,
    NGRAM_MAX: tl.constexpr, NUM_DRAFTS: tl.constexpr, DRAFTS_PADDED: tl.constexpr, PLACES: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    number = tl.load(state + slot * state_stride + _HISTORY).to(tl.int32)
    tokens = history + slot * history_stride
    # Longer first, then later: one number, as an n-gram's size is a digit above any place.
    best = tl.full([PLACES], -1, tl.int64)
    for first in range(0, number - 1, PLACES):
        ends = first + tl.arange(0, PLACES)
        is_same = ends < number - 1
        size = tl.zeros([PLACES], tl.int64)
        for back in tl.static_range(NGRAM_MAX):
            wanted_token = tl.load(tokens + tl.maximum(number - 1 - back, 0))
            token = tl.load(tokens + ends - back, mask=is_same & (ends >= back), other=-1)
            is_same = is_same & (token == wanted_token)
            size += is_same.to(tl.int64)
        best = tl.maximum(best, tl.where(size >= NGRAM_MIN, (size << 32) + ends, -1))
    found = tl.max(best, 0)
    start = tl.where(found >= 0, (found & 0xFFFFFFFF).to(tl.int32) + 1, number)
    columns = tl.arange(0, DRAFTS_PADDED)
    is_draft = (start + columns < number) & (columns < tl.load(wanted + row))
    draft = tl.load(tokens + start + columns, mask=is_draft, other=-1)
    tl.store(drafts + row * NUM_DRAFTS + columns, draft.to(tl.int64), mask=columns < NUM_DRAFTS)


def follow_ngrams(
    history: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    wanted: torch.Tensor,
    num_drafts: int,
    ngram_min: int,
    ngram_max: int,
) -> torch.Tensor:
    """int64 [R, num_drafts]: what followed the last time that each slot's history stood as it does, -1 from where
    nothing did, or no more is wanted. history: int32 [num_slots, width], of each slot what state's HISTORY says.

    slots, wanted: int32 [R]. Does not block.
    """
    drafts = torch.empty(slots.shape[0], num_drafts, dtype=torch.int64, device=history.device)
    _follow_ngram[(slots.shape[0],)](
        history, state, slots, wanted, drafts, history.stride(0), state.stride(0), NGRAM_MIN=ngram_min,
        NGRAM_MAX=ngram_max, NUM_DRAFTS=num_drafts, DRAFTS_PADDED=triton.next_power_of_2(num_drafts), PLACES=_PLACES,
        num_warps=8,
    )  # fmt: skip
    return drafts
