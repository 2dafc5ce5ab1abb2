"""Samples the token of a row whose top-k is small, in one program, from the few tokens that it may keep.

As many pieces of the vocabulary as top-k keeps tokens have one at or above some bound, so the k-th token is above it
too: all that are, a little more than k, are gathered in the order of their ids. Among them the least likely token to
keep is found bit by bit, by counts (top-k) and masses (top-p), as `token_search` finds it among all; then each has its
noise. Where more are as likely than there is room for (a row of equal logits), the whole row is gone through instead.
The first of the tokens are in registers all the while (`own`), and so are all that were gathered.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.gumbel_noise import IS_EXACT, gumbel
from replicas.kernels.slot_columns import DROP_MASS, SEED, TEMPERATURE, TOP_K
from replicas.kernels.token_search import GREEDY_BELOW, PIECE, bound_of, float_of, key_of, lowest_key, row_maximum

_SEED, _TOP_K = tl.constexpr(SEED), tl.constexpr(TOP_K)
_TEMPERATURE, _DROP_MASS = tl.constexpr(TEMPERATURE), tl.constexpr(DROP_MASS)
_MOST_KEPT = 256
_CAPACITY = 2048  # tokens gathered, or looked at, at once
_PIECES_AT_ONCE = 8


def picks(most_kept: int, num_pieces: int) -> bool:
    """Whether rows whose top-k is 1 to most_kept are few enough for `pick_tokens`; 0: there are rows without one."""
    return 0 < most_kept <= min(_MOST_KEPT, num_pieces // 2)


@triton.jit
def _some(row_logits, row_ids, row_values, first, count, is_gathered, CAPACITY: tl.constexpr):
    """Ids, logits and existence of CAPACITY tokens from `first`: of those gathered, or of the whole row."""
    places = first + tl.arange(0, CAPACITY)
    is_place = places < count
    ids = tl.where(is_gathered, tl.load(row_ids + places, mask=is_place & is_gathered, other=0), places)
    gathered = tl.load(row_values + places, mask=is_place & is_gathered, other=float("-inf"))
    others = tl.load(row_logits + places, mask=is_place & (is_gathered == 0), other=float("-inf")).to(tl.float32)
    x = tl.where(is_gathered, gathered, others)
    return ids, x, is_place & (x == x)


@triton.jit
def _num_reaching(
    key, own, is_own, row_logits, row_ids, row_values, count, is_gathered, CAPACITY: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    total = tl.sum((is_own & (key_of(own, SHIFT) >= key)).to(tl.int32), 0)
    for first in range(CAPACITY, count, CAPACITY):
        _, x, is_token = _some(row_logits, row_ids, row_values, first, count, is_gathered, CAPACITY)
        total += tl.sum((is_token & (key_of(x, SHIFT) >= key)).to(tl.int32), 0)
    return total


@triton.jit
def _mass_between(
    low, high, maximum, temperature, own, is_own, row_logits, row_ids, row_values, count, is_gathered,
    CAPACITY: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Of the tokens whose keys are low or above and below high."""
    total = _mass_of(own, is_own, low, high, maximum, temperature, SHIFT)
    for first in range(CAPACITY, count, CAPACITY):
        _, x, is_token = _some(row_logits, row_ids, row_values, first, count, is_gathered, CAPACITY)
        total += _mass_of(x, is_token, low, high, maximum, temperature, SHIFT)
    return total


@triton.jit
def _mass_of(x, is_token, low, high, maximum, temperature, SHIFT: tl.constexpr):
    key = key_of(x, SHIFT)
    is_counted = is_token & (key >= low) & (key < high)
    return tl.sum(tl.where(is_counted, tl.exp((x - maximum) / temperature), 0.0), 0)


@triton.jit
def _gather(
    row_logits, row_pieces, row_ids, row_values, piece_keys, is_piece, bound, VOCAB: tl.constexpr,
    PIECES_PADDED: tl.constexpr, NUM_PIECES: tl.constexpr, PIECES_AT_ONCE: tl.constexpr, CAPACITY: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Write the tokens whose keys reach the bound, those that there is room for; how many there are."""
    is_wanted = is_piece & (piece_keys >= bound)
    places_of_pieces = tl.cumsum(is_wanted.to(tl.int32), 0) - 1
    tl.store(row_pieces + places_of_pieces, tl.arange(0, PIECES_PADDED), mask=is_wanted)
    num_wanted = tl.sum(is_wanted.to(tl.int32), 0)
    tl.debug_barrier()  # other threads read what was just written
    count = tl.zeros([], tl.int32)
    for first in range(0, num_wanted, PIECES_AT_ONCE):
        numbers = first + tl.arange(0, PIECES_AT_ONCE)
        wanted = tl.load(row_pieces + numbers, mask=numbers < num_wanted, other=NUM_PIECES)
        ids = tl.reshape(wanted[:, None] * PIECE + tl.arange(0, PIECE)[None, :], [PIECES_AT_ONCE * PIECE])
        x = tl.load(row_logits + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
        is_kept = (ids < VOCAB) & (x == x) & (key_of(x, SHIFT) >= bound)
        places = count + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(row_ids + places, ids, mask=is_kept & (places < CAPACITY))
        tl.store(row_values + places, x, mask=is_kept & (places < CAPACITY))
        count += tl.sum(is_kept.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit
def _last_of_top_k(
    bound, highest, top_k, own, is_own, row_logits, row_ids, row_values, count, is_gathered, CAPACITY: tl.constexpr,
    NUM_BITS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The largest key that top_k tokens reach."""
    kept = tl.zeros([], tl.int64)
    for number in range(NUM_BITS):
        shift = NUM_BITS - 1 - number
        if (bound >> shift) == (highest >> shift):
            kept = (bound >> shift) << shift  # this bit and those before are known
        else:
            higher = kept + (tl.full([], 1, tl.int64) << shift)
            reached = _num_reaching(
                higher, own, is_own, row_logits, row_ids, row_values, count, is_gathered, CAPACITY, SHIFT
            )
            kept = tl.where(reached >= top_k, higher, kept)
    return kept


@triton.jit
def _last_of_top_p(
    kept, highest, drop_mass, maximum, temperature, own, is_own, row_logits, row_ids, row_values, count, is_gathered,
    CAPACITY: tl.constexpr, NUM_BITS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The largest key below which the tokens that top-k keeps have no more than drop_mass of their mass."""
    limit = drop_mass * _mass_between(
        kept, highest + 1, maximum, temperature, own, is_own, row_logits, row_ids, row_values, count, is_gathered,
        CAPACITY, SHIFT,
    )  # fmt: skip
    threshold = tl.zeros([], tl.int64)
    for number in range(NUM_BITS):
        shift = NUM_BITS - 1 - number
        if (kept >> shift) == (highest >> shift):
            threshold = (kept >> shift) << shift
        else:
            higher = threshold + (tl.full([], 1, tl.int64) << shift)
            below = _mass_between(
                kept, higher, maximum, temperature, own, is_own, row_logits, row_ids, row_values, count, is_gathered,
                CAPACITY, SHIFT,
            )  # fmt: skip
            threshold = tl.where(below <= limit, higher, threshold)
    return tl.maximum(kept, tl.minimum(threshold, highest))


@triton.jit
def _best_with_noise(
    threshold, maximum, temperature, seed, position, choice, row_logits, row_ids, row_values, count, is_gathered,
    CAPACITY: tl.constexpr, SHIFT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Of the tokens whose keys reach the threshold."""
    positions = position + tl.zeros([CAPACITY], tl.int32)
    choices = choice + tl.zeros([CAPACITY], tl.int32)
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.zeros([], tl.int32)
    for first in range(0, count, CAPACITY):
        ids, x, is_token = _some(row_logits, row_ids, row_values, first, count, is_gathered, CAPACITY)
        words = tl.philox(seed, ids // 4, positions, choices, tl.zeros([CAPACITY], tl.int32))
        lane = ids % 4
        word = tl.where(lane < 2, tl.where(lane == 0, words[0], words[1]), tl.where(lane == 2, words[2], words[3]))
        scores = (x - maximum) / temperature + gumbel(word.to(tl.uint32), EXACT)
        scores = tl.where(is_token & (key_of(x, SHIFT) >= threshold), scores, float("-inf"))
        top, at = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        if top > best:
            best = top
            token = tl.sum(tl.where(tl.arange(0, CAPACITY) == at, ids, 0), 0)
    return token


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "choices"])
def _pick(
    logits, piece_maxima, partial_values, wanted_pieces, gathered_ids, gathered_values, tokens, state, slots, positions,
    choices, logits_stride, state_stride,
    VOCAB: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr, NUM_PIECES: tl.constexpr,
    PIECES_PADDED: tl.constexpr, PIECES_AT_ONCE: tl.constexpr, CAPACITY: tl.constexpr, NUM_BITS: tl.constexpr,
    SHIFT: tl.constexpr, EXACT: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    params = state + tl.load(slots + row).to(tl.int64) * state_stride
    temperature = float_of(tl.load(params + _TEMPERATURE))
    if temperature >= GREEDY_BELOW:
        top_k = tl.load(params + _TOP_K)
        maximum = row_maximum(partial_values, row, NUM_BLOCKS, BLOCKS_PADDED)
        highest = key_of(maximum, SHIFT)
        row_logits = logits + row * logits_stride
        row_ids, row_values = gathered_ids + row * CAPACITY, gathered_values + row * CAPACITY

        pieces = tl.arange(0, PIECES_PADDED)
        is_piece = pieces < NUM_PIECES
        maxima = tl.load(piece_maxima + row * NUM_PIECES + pieces, mask=is_piece, other=float("-inf"))
        piece_keys = key_of(maxima, SHIFT)
        # Where a mask allows fewer tokens than top-k keeps, those at -inf are not among the kept: they are too many to
        # be gathered, and one program would go through the whole vocabulary for each bit.
        bound = tl.maximum(bound_of(piece_keys, is_piece, top_k, NUM_BITS), lowest_key(SHIFT))
        row_pieces = wanted_pieces + row * NUM_PIECES
        count = _gather(
            row_logits, row_pieces, row_ids, row_values, piece_keys, is_piece, bound, VOCAB, PIECES_PADDED, NUM_PIECES,
            PIECES_AT_ONCE, CAPACITY, SHIFT,
        )  # fmt: skip
        is_gathered = count <= CAPACITY
        count = tl.where(is_gathered, count, VOCAB)

        _, own, is_own = _some(row_logits, row_ids, row_values, 0, count, is_gathered, CAPACITY)
        threshold = _last_of_top_k(
            bound, highest, top_k, own, is_own, row_logits, row_ids, row_values, count, is_gathered, CAPACITY, NUM_BITS,
            SHIFT,
        )  # fmt: skip
        drop_mass = float_of(tl.load(params + _DROP_MASS))
        if (drop_mass >= 0) & (threshold < highest):
            threshold = _last_of_top_p(
                threshold, highest, drop_mass, maximum, temperature, own, is_own, row_logits, row_ids, row_values,
                count, is_gathered, CAPACITY, NUM_BITS, SHIFT,
            )  # fmt: skip
        token = _best_with_noise(
            threshold, maximum, temperature, tl.load(params + _SEED), tl.load(positions + row) + 1,
            tl.load(choices + row), row_logits, row_ids, row_values, count, is_gathered, CAPACITY, SHIFT, EXACT,
        )  # fmt: skip
        tl.store(tokens + row, token)


def pick_tokens(
    logits: torch.Tensor,
    piece_maxima: torch.Tensor,
    block_maxima: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    num_key_bits: int,
) -> torch.Tensor:
    """One token id per sampled row, int32 [R, 1]; undefined for greedy rows, and for those with a NaN.

    As `draw_tokens`, of rows that `picks` allows. piece_maxima float32 [R, pieces], block_maxima float32 [R, blocks]:
    the largest logits of them. num_key_bits: of `key_of`, 32 less the bits that it drops. Does not block.
    """
    num_rows, vocab_size = logits.shape
    num_pieces, num_blocks = piece_maxima.shape[1], block_maxima.shape[1]

    def empty(width: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=logits.device)

    tokens, wanted_pieces = empty(1), empty(num_pieces)
    ids, values = empty(_CAPACITY), empty(_CAPACITY, torch.float32)
    _pick[(num_rows,)](
        logits, piece_maxima, block_maxima, wanted_pieces, ids, values, tokens, state, slots, positions, choices,
        logits.stride(0), state.stride(0), VOCAB=vocab_size, NUM_BLOCKS=num_blocks,
        BLOCKS_PADDED=triton.next_power_of_2(num_blocks), NUM_PIECES=num_pieces,
        PIECES_PADDED=triton.next_power_of_2(num_pieces), PIECES_AT_ONCE=_PIECES_AT_ONCE, CAPACITY=_CAPACITY,
        NUM_BITS=num_key_bits, SHIFT=32 - num_key_bits, EXACT=IS_EXACT, num_warps=8,
    )  # fmt: skip
    return tokens
