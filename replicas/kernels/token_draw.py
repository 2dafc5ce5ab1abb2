"""Samples one token per row on the GPU, with the parameters that its slot keeps.

The same function of (logits, parameters, seed, choice, position) as `replicas.sampling.draw`, which is its
reference: temperature, top-k, top-p (`token_search`), Gumbel-max with Philox noise. Rows that are greedy or unfiltered
leave the kernels they do not need at once, so any mix costs what its rows need.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
    logits, values, indices, sums, brackets, bounds, partial_values, state, slots, positions, choices, logits_stride,
    state_stride, num_rows,
    VOCAB: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    NUM_PASSES: tl.constexpr, SHIFT: tl.constexpr, IS_FILTERED: tl.constexpr, EXACT: tl.constexpr,
) -> None:  # fmt: skip
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
    tokens, greedy_values, greedy_indices, drawn_values, drawn_indices, broken, mask_places, state, slots, positions,
    state_stride,
    NUM_BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr, HAS_SAMPLED: tl.constexpr, ARE_PICKED: tl.constexpr,
    HAS_MASKS: tl.constexpr,
) -> None:  # fmt: skip
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
    blocks = _best_of_blocks(logits, has_filtered)
    drawn_values, drawn_indices = blocks.values, blocks.indices
    are_picked = has_sampled and has_filtered and picks(most_kept, blocks.piece_maxima.shape[1])
    if are_picked:
        drawn_indices = pick_tokens(
            logits, blocks.piece_maxima, blocks.values, state, slots, positions, choices, 4 * _num_passes(logits)
        )  # fmt: skip
    elif has_sampled:
        rows = _SampledRows(state, slots, positions, choices)
        drawn_values, drawn_indices = _draw_of_blocks(logits, blocks, rows, has_filtered)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    maybe_places = blocks.broken if mask_places is None else mask_places  # never read if None
    _choose[(num_rows,)](
        tokens, blocks.values, blocks.indices, drawn_values, drawn_indices, blocks.broken, maybe_places,
        state, slots, positions, state.stride(0), HAS_SAMPLED=has_sampled, ARE_PICKED=are_picked,
        HAS_MASKS=mask_places is not None, **_block_sizes(vocab_size),
    )  # fmt: skip
    return tokens


class _BestOfBlocks(NamedTuple):
    """values [R, blocks]: the largest logit; indices: its token; broken: whether one is no number, int32; piece_maxima
    [R, pieces]: the largest of each piece, if anything is filtered; else never read."""

    values: torch.Tensor
    indices: torch.Tensor
    broken: torch.Tensor
    piece_maxima: torch.Tensor


class _SampledRows(NamedTuple):
    """As `draw_tokens` has them."""

    state: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    choices: torch.Tensor


def _best_of_blocks(logits: torch.Tensor, has_pieces: bool) -> _BestOfBlocks:
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    values = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    indices = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    pieces = values.new_empty(num_rows, num_blocks * (_BLOCK // PIECE.value)) if has_pieces else values
    best = _BestOfBlocks(values, indices, torch.empty_like(indices), pieces)
    _best_of_block[(num_rows, num_blocks)](
        logits, *best, logits.stride(0), VOCAB=vocab_size, NUM_BLOCKS=num_blocks, BLOCK=_BLOCK, HAS_PIECES=has_pieces,
    )  # fmt: skip
    return best


def _draw_of_blocks(
    logits: torch.Tensor, blocks: _BestOfBlocks, rows: _SampledRows, is_filtered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each block the largest logit with noise among what is kept, and its token; of rows that sample."""
    num_passes = _num_passes(logits)
    shift = 32 - 4 * num_passes
    search = {"BLOCK": _BLOCK, "NUM_PASSES": num_passes, "SHIFT": shift, **_block_sizes(logits.shape[1])}
    found = _search(logits, blocks, rows, search) if is_filtered else (blocks.values,) * 3  # then never read
    values, indices = torch.empty_like(blocks.values), torch.empty_like(blocks.indices)
    _draw_of_block[tuple(values.shape)](
        logits, values, indices, *found, blocks.values, rows.state, rows.slots, rows.positions, rows.choices,
        logits.stride(0), rows.state.stride(0), len(logits), VOCAB=logits.shape[1], IS_FILTERED=is_filtered,
        EXACT=IS_EXACT, **search,
    )  # fmt: skip
    return values, indices


def _search(
    logits: torch.Tensor, blocks: _BestOfBlocks, rows: _SampledRows, search: Mapping[str, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums, brackets and bounds, from which `find_threshold` has the least likely token that a row keeps. search: the
    constants that all of its kernels have."""
    (num_rows, num_blocks), num_passes, vocab_size = blocks.values.shape, search["NUM_PASSES"], logits.shape[1]
    num_pieces = blocks.piece_maxima.shape[1]
    sums = blocks.values.new_empty(2 * num_passes, num_rows, num_blocks, 16)
    brackets = torch.empty(2 * num_passes, num_rows, dtype=torch.int64, device=logits.device)
    bounds = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    find_bound[(num_rows,)](
        blocks.piece_maxima, bounds, rows.state, rows.slots, rows.state.stride(0), VOCAB=vocab_size,
        NUM_PIECES=num_pieces, PIECES_PADDED=triton.next_power_of_2(num_pieces), NUM_BITS=4 * num_passes,
        SHIFT=search["SHIFT"],
    )  # fmt: skip
    for is_mass in (False, True):
        for number in range(num_passes):
            narrow[(num_rows, num_blocks)](
                logits, sums, brackets, bounds, blocks.piece_maxima, blocks.values, rows.state, rows.slots,
                logits.stride(0), rows.state.stride(0), num_rows, number, VOCAB=vocab_size, IS_MASS=is_mass, **search,
            )  # fmt: skip
    return sums, brackets, bounds


def _num_passes(logits: torch.Tensor) -> int:
    """A key's bits are taken four at a time: as many of a float32's as the logits' type has, rounded up."""
    return {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}[logits.dtype]


def _block_sizes(vocab_size: int) -> dict[str, int]:
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    return {"NUM_BLOCKS": num_blocks, "BLOCKS_PADDED": triton.next_power_of_2(num_blocks)}
