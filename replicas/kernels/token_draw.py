"""Samples one token per row on the GPU, with the parameters that its slot keeps.

The same function of (logits, parameters, seed, choice, position) as `replicas.sampling.draw`, which is its
reference: temperature, top-k, top-p (`token_search`), Gumbel-max with Philox noise. Rows that are greedy or unfiltered
leave the kernels they do not need at once, so any mix costs what its rows need.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.gumbel_noise import IS_EXACT, gumbel
from replicas.kernels.slot_columns import DROP_MASS, LAST_TOKEN, SEED, TEMPERATURE, TOP_K
from replicas.kernels.token_pick import pick_tokens, picks
from replicas.kernels.token_search import (
    GREEDY_BELOW,
    PIECE,
    find_bound,
    find_threshold,
    float_of,
    key_of,
    lowest_key,
    narrow,
    row_maximum,
)

_NOT_A_TOKEN, _NOTHING_ALLOWED = tl.constexpr(-1), tl.constexpr(-2)
_LAST_TOKEN, _SEED, _TOP_K = tl.constexpr(LAST_TOKEN), tl.constexpr(SEED), tl.constexpr(TOP_K)
_TEMPERATURE, _DROP_MASS = tl.constexpr(TEMPERATURE), tl.constexpr(DROP_MASS)
_BLOCK = 4096


@triton.jit
def _best_of_block(
    logits, values, indices, broken, piece_maxima, logits_stride, VOCAB: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, HAS_PIECES: tl.constexpr,
) -> None:  # fmt: skip
    """The largest logit of each block of the vocabulary, the lowest id of equal ones, and whether one is no number.

    With HAS_PIECES also the largest of each piece.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    is_id = ids < VOCAB
    x = tl.load(logits + row.to(tl.int64) * logits_stride + ids, mask=is_id, other=float("-inf")).to(tl.float32)
    is_nan = x != x
    x = tl.where(is_nan, float("-inf"), x)
    best, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    out = row * NUM_BLOCKS + block
    tl.store(values + out, best)
    tl.store(indices + out, block * BLOCK + at)
    tl.store(broken + out, tl.max(is_nan.to(tl.int32), 0))
    if HAS_PIECES:
        num_pieces: tl.constexpr = BLOCK // PIECE
        places = out.to(tl.int64) * num_pieces + tl.arange(0, num_pieces)
        tl.store(piece_maxima + places, tl.max(tl.reshape(x, [num_pieces, PIECE]), 1))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "positions", "choices"])
def _draw_of_block(
    logits,
    values,
    indices,
    sums,
    brackets,
    bounds,
    partial_values,
    state,
    slots,
    positions,
    choices,
    logits_stride,
    state_stride,
    num_rows,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PASSES: tl.constexpr,
    SHIFT: tl.constexpr,
    IS_FILTERED: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """For sampled rows: the largest scaled logit plus noise of each block of the vocabulary."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    params = state + tl.load(slots + row).to(tl.int64) * state_stride
    temperature = float_of(tl.load(params + _TEMPERATURE))
    if temperature >= GREEDY_BELOW:
        maximum = row_maximum(partial_values, row, NUM_BLOCKS, BLOCKS_PADDED)
        threshold = lowest_key(SHIFT)
        if IS_FILTERED:
            top_k, drop_mass = tl.load(params + _TOP_K), float_of(tl.load(params + _DROP_MASS))
            threshold = find_threshold(
                sums, brackets, tl.load(bounds + row), maximum, top_k, drop_mass, row, num_rows, VOCAB, NUM_BLOCKS,
                BLOCKS_PADDED, NUM_PASSES, SHIFT,
            )  # fmt: skip
        top = tl.full([], float("-inf"), tl.float32)
        token = block * BLOCK
        block_maximum = tl.load(partial_values + row * NUM_BLOCKS + block)
        if key_of(block_maximum, SHIFT) >= threshold:
            seed = tl.load(params + _SEED)
            groups = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
            position = tl.load(positions + row) + 1 + tl.zeros([BLOCK // 4], tl.int32)
            choice = tl.load(choices + row) + tl.zeros([BLOCK // 4], tl.int32)
            words = tl.philox(seed, groups, position, choice, tl.zeros([BLOCK // 4], tl.int32))
            best = tl.full([BLOCK // 4], float("-inf"), tl.float32)
            lanes = tl.zeros([BLOCK // 4], tl.int32)
            for lane in tl.static_range(4):
                ids = groups * 4 + lane
                x = tl.load(logits + row * logits_stride + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
                is_kept = (key_of(x, SHIFT) >= threshold) & (x == x)
                scores = (x - maximum) / temperature + gumbel(words[lane].to(tl.uint32), EXACT)
                scores = tl.where(is_kept, scores, float("-inf"))
                lanes = tl.where(scores > best, lane, lanes)
                best = tl.maximum(best, scores)
            top, at = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
            lane = tl.sum(tl.where(tl.arange(0, BLOCK // 4) == at, lanes, 0), 0)
            token += at * 4 + lane
        tl.store(values + row * NUM_BLOCKS + block, top)
        tl.store(indices + row * NUM_BLOCKS + block, token)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "mask_places"])
def _choose(
    tokens,
    greedy_values,
    greedy_indices,
    drawn_values,
    drawn_indices,
    broken,
    mask_places,
    state,
    slots,
    positions,
    state_stride,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    HAS_SAMPLED: tl.constexpr,
    ARE_PICKED: tl.constexpr,
    HAS_MASKS: tl.constexpr,
) -> None:
    """The best block's token, NOT_A_TOKEN for a row with a NaN or without any finite logit; it feeds the next step.

    With HAS_MASKS a row of nothing but -inf is one whose mask and logits have no token in common: NOTHING_ALLOWED.
    """
    row = tl.program_id(0)
    params = state + tl.load(slots + row).to(tl.int64) * state_stride
    index = tl.arange(0, BLOCKS_PADDED)
    mask = index < NUM_BLOCKS
    places = row * NUM_BLOCKS + index
    greedy = tl.load(greedy_values + places, mask=mask, other=float("-inf"))
    _, at = tl.max(greedy, 0, return_indices=True, return_indices_tie_break_left=True)
    chosen = tl.load(greedy_indices + row * NUM_BLOCKS + at)
    if HAS_SAMPLED:  # noqa: SIM102 - likewise
        if float_of(tl.load(params + _TEMPERATURE)) >= GREEDY_BELOW:
            if ARE_PICKED:
                chosen = tl.load(drawn_indices + row)
            else:
                drawn = tl.load(drawn_values + places, mask=mask, other=float("-inf"))
                _, drawn_at = tl.max(drawn, 0, return_indices=True, return_indices_tie_break_left=True)
                chosen = tl.load(drawn_indices + row * NUM_BLOCKS + drawn_at)
    has_nan = tl.max(tl.load(broken + places, mask=mask, other=0), 0) > 0
    peak = tl.max(greedy, 0)
    is_finite = tl.abs(peak) < float("inf")
    none = _NOT_A_TOKEN
    if HAS_MASKS:
        is_masked = tl.load(mask_places + row) >= 0
        none = tl.where(is_masked & (peak == float("-inf")), _NOTHING_ALLOWED, _NOT_A_TOKEN)
    token = tl.where(has_nan, _NOT_A_TOKEN, tl.where(is_finite, chosen, none)).to(tl.int64)
    tl.store(tokens + row, token)
    # No token must still be some id: the next step may be planned already, and is dropped.
    tl.store(params + _LAST_TOKEN, tl.maximum(token, 0), mask=tl.load(positions + row) >= 0)


def draw_tokens(
    logits: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    *,
    has_sampled: bool = True,
    has_filtered: bool = True,
    most_kept: int = 0,
    mask_places: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token id per row, int64 [R]; -1 (NOT_A_TOKEN) where the logits are no numbers, -2 (NOTHING_ALLOWED) where
    masks have left none.

    logits [R, V], rows contiguous, of any float type; state: int64 rows of slots, as `replicas.kernels.slot_columns`;
    slots, positions (of the token that was fed), choices: int32 [R]. has_sampled, has_filtered: whether some row
    samples, or has a top-k or top-p; kernels that no row needs are left out. most_kept: the largest top-k where every
    row that samples has one, else 0. mask_places: int32 [R], as `forbid_tokens` had it; None: it has gone over no row.
    Mutates state: each slot's last token, but for rows at position -1, which are padding. Does not block.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    sizes = {"NUM_BLOCKS": num_blocks, "BLOCKS_PADDED": triton.next_power_of_2(num_blocks)}
    # A key's bits are taken four at a time: as many of a float32's as the logits' type has, rounded up.
    num_passes = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}[logits.dtype]
    stride, state_stride = logits.stride(0), state.stride(0)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    greedy_values, greedy_indices = empty(num_rows, num_blocks), empty(num_rows, num_blocks, dtype=torch.int32)
    broken = torch.empty_like(greedy_indices)
    every_block = (num_rows, num_blocks)
    num_pieces = num_blocks * (_BLOCK // PIECE.value)
    piece_maxima = empty(num_rows, num_pieces) if has_filtered else greedy_values
    _best_of_block[every_block](
        logits, greedy_values, greedy_indices, broken, piece_maxima, stride, VOCAB=vocab_size, NUM_BLOCKS=num_blocks,
        BLOCK=_BLOCK, HAS_PIECES=has_filtered,
    )  # fmt: skip
    drawn_values, drawn_indices = greedy_values, greedy_indices
    are_picked = has_sampled and has_filtered and picks(most_kept, num_pieces)
    if are_picked:
        drawn_indices = pick_tokens(
            logits, piece_maxima, greedy_values, state, slots, positions, choices, 4 * num_passes
        )  # fmt: skip
    elif has_sampled:
        drawn_values, drawn_indices = torch.empty_like(greedy_values), torch.empty_like(greedy_indices)
        sums = brackets = bounds = greedy_values  # never read
        search = {"VOCAB": vocab_size, "BLOCK": _BLOCK, "NUM_PASSES": num_passes, "SHIFT": 32 - 4 * num_passes, **sizes}
        if has_filtered:
            sums = empty(2 * num_passes, num_rows, num_blocks, 16)
            brackets = empty(2 * num_passes, num_rows, dtype=torch.int64)
            bounds = empty(num_rows, dtype=torch.int64)
            find_bound[(num_rows,)](
                piece_maxima, bounds, state, slots, state_stride, VOCAB=vocab_size, NUM_PIECES=num_pieces,
                PIECES_PADDED=triton.next_power_of_2(num_pieces), NUM_BITS=4 * num_passes, SHIFT=search["SHIFT"],
            )  # fmt: skip
            for is_mass in (False, True):
                for number in range(num_passes):
                    narrow[every_block](
                        logits, sums, brackets, bounds, piece_maxima, greedy_values, state, slots, stride,
                        state_stride, num_rows, number, IS_MASS=is_mass, **search,
                    )  # fmt: skip
        _draw_of_block[every_block](
            logits, drawn_values, drawn_indices, sums, brackets, bounds, greedy_values, state, slots, positions,
            choices, stride, state_stride, num_rows, IS_FILTERED=has_filtered, EXACT=IS_EXACT, **search,
        )  # fmt: skip
    tokens = empty(num_rows, dtype=torch.int64)
    maybe_places = broken if mask_places is None else mask_places  # never read if None
    _choose[(num_rows,)](
        tokens, greedy_values, greedy_indices, drawn_values, drawn_indices, broken, maybe_places,
        state, slots, positions, state_stride, HAS_SAMPLED=has_sampled, ARE_PICKED=are_picked,
        HAS_MASKS=mask_places is not None, **sizes,
    )  # fmt: skip
    return tokens
