"""The least likely token that top-k and top-p keep, found in the logits without a sort; for `token_draw`.

The bits of its logit are found four at a time, from the highest down, by counts (top-k) or masses (top-p) of the
tokens at each of the sixteen digits. Every pass runs in parallel over rows and blocks of the vocabulary; what a block
found is summed in a fixed order, so the same logits always give the same token.

With a top-k of k most of the vocabulary is never looked at: where k pieces of it have a token above some bound, the
k-th token is above it too, so pieces without such a token hold none that counts. Nor do pieces of tokens at -inf alone,
which are most of a row's where a mask allows few. And what this bound and the largest logit have in common of their
leading bits is known without a pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replicas.kernels.slot_columns import DROP_MASS, TEMPERATURE, TOP_K
from replicas.sampling import draw

GREEDY_BELOW = tl.constexpr(draw.GREEDY_BELOW)
_TOP_K, _TEMPERATURE, _DROP_MASS = tl.constexpr(TOP_K), tl.constexpr(TEMPERATURE), tl.constexpr(DROP_MASS)
PIECE = tl.constexpr(256)  # tokens looked at, or not, at once


@triton.jit
def float_of(bits):
    """A float32 kept as the low half of an int64."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """An integer in the order of the float32 x; SHIFT drops the low bits that its original type does not have."""
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 is no less than 0.0
    bits = x.to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits | -2147483648)
    return flipped.to(tl.uint32, bitcast=True).to(tl.int64) >> SHIFT


@triton.jit
def row_maximum(partial_values, row, NUM_BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr):
    index = tl.arange(0, BLOCKS_PADDED)
    values = tl.load(partial_values + row * NUM_BLOCKS + index, mask=index < NUM_BLOCKS, other=float("-inf"))
    # A row of only -inf has no finite maximum, and -inf - -inf would be NaN.
    return tl.maximum(tl.max(values, 0), -3.4028234663852886e38)


@triton.jit
def lowest_key(SHIFT: tl.constexpr):
    """Of a token that may be chosen: all but those at -inf, which a mask or the model itself forbids."""
    return key_of(tl.full([], -3.4028234663852886e38, tl.float32), SHIFT)


@triton.jit
def _picked(sums, bracket, target, shift, NUM_BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr, IS_MASS: tl.constexpr):
    """The bracket after a pass: `bracket` and the pass's four bits, from its blocks' sums [NUM_BLOCKS, 16] at `sums`.

    target: how many tokens to keep, or the share of the mass that may be dropped.
    """
    blocks, digits = tl.arange(0, BLOCKS_PADDED), tl.arange(0, 16)
    places = blocks[:, None] * 16 + digits[None, :]
    totals = tl.sum(tl.load(sums + places, mask=(blocks < NUM_BLOCKS)[:, None], other=0.0), 0)
    if IS_MASS:
        limit = target * tl.sum(tl.where(digits == 0, totals, 0.0), 0)
        holds = totals <= limit
    else:
        holds = totals >= target
    # The sums fall, or rise, with the digit: so many hold as the largest digit that does.
    digit = tl.sum((holds & (digits > 0)).to(tl.int64), 0)
    return bracket + (digit << shift)


@triton.jit
def bound_of(piece_keys, is_piece, top_k, NUM_BITS: tl.constexpr):
    """The largest key that as many pieces reach as top-k keeps tokens; 0 where it keeps more than there are pieces."""
    bound = tl.zeros([], tl.int64)
    for number in range(NUM_BITS):
        higher = bound + (tl.full([], 1, tl.int64) << (NUM_BITS - 1 - number))
        reached = tl.sum((is_piece & (piece_keys >= higher)).to(tl.int32), 0)
        bound = tl.where(reached >= top_k, higher, bound)
    return bound


@triton.jit(do_not_specialize_on_alignment=["slots"])
def find_bound(
    piece_maxima,
    bounds,
    state,
    slots,
    state_stride,
    VOCAB: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    PIECES_PADDED: tl.constexpr,
    NUM_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
) -> None:
    """A row's bound: the largest key that as many pieces reach as its top-k keeps tokens, or the lowest of any token
    that may be chosen, where it keeps too many.

    Pieces whose largest key is below hold no token that the top-k keeps.
    """
    row = tl.program_id(0).to(tl.int64)
    params = state + tl.load(slots + row).to(tl.int64) * state_stride
    top_k = tl.load(params + _TOP_K)
    bound = lowest_key(SHIFT)
    if (top_k > 0) & (top_k < VOCAB) & (float_of(tl.load(params + _TEMPERATURE)) >= GREEDY_BELOW):
        pieces = tl.arange(0, PIECES_PADDED)
        is_piece = pieces < NUM_PIECES
        keys = key_of(tl.load(piece_maxima + row * NUM_PIECES + pieces, mask=is_piece, other=float("-inf")), SHIFT)
        bound = tl.maximum(bound, bound_of(keys, is_piece, top_k, NUM_BITS))
    tl.store(bounds + row, bound)


@triton.jit
def _last_of_top_k(
    sums, brackets, bound, highest, top_k, row, num_rows, NUM_BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr,
    NUM_PASSES: tl.constexpr,
):  # fmt: skip
    """The key of the least likely token that a row's top-k keeps, after its passes."""
    kept = bound
    if bound < highest:
        last = (NUM_PASSES - 1) * num_rows + row
        kept = _picked(
            sums + last * NUM_BLOCKS * 16, tl.load(brackets + last), top_k.to(tl.float32), 0,
            NUM_BLOCKS, BLOCKS_PADDED, False,
        )  # fmt: skip
    return tl.maximum(kept, bound)  # below the bound nothing is kept where fewer tokens are there than top-k keeps


@triton.jit(do_not_specialize=["num_rows", "pass_number"], do_not_specialize_on_alignment=["slots"])
def narrow(
    logits, sums, brackets, bounds, piece_maxima, partial_values, state, slots, logits_stride, state_stride, num_rows,
    pass_number,
    VOCAB: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    NUM_PASSES: tl.constexpr, SHIFT: tl.constexpr, IS_MASS: tl.constexpr,
) -> None:  # fmt: skip
    """One pass of the search for the least likely token to keep: four bits of its key, from the highest down.

    Sums of a block for each digit d: the number of tokens at or above the bracket's digit d (top-k), or the mass of the
    kept ones below it, and at 0 the mass of all kept (top-p, whose brackets and sums lie behind those of top-k).
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    params = state + tl.load(slots + row).to(tl.int64) * state_stride
    temperature = float_of(tl.load(params + _TEMPERATURE))
    top_k = tl.load(params + _TOP_K)
    drop_mass = float_of(tl.load(params + _DROP_MASS))
    has_top_k = (top_k > 0) & (top_k < VOCAB)
    if IS_MASS:
        is_needed = (temperature >= GREEDY_BELOW) & (drop_mass >= 0)
        target = drop_mass
    else:
        is_needed = (temperature >= GREEDY_BELOW) & has_top_k
        target = top_k.to(tl.float32)
    if is_needed:
        maximum = row_maximum(partial_values, row, NUM_BLOCKS, BLOCKS_PADDED)
        highest = key_of(maximum, SHIFT)
        kept = tl.load(bounds + row)  # whatever is below is not kept
        if IS_MASS:  # noqa: SIM102 - two conditions of two times: compilation and run
            if has_top_k:
                kept = _last_of_top_k(
                    sums, brackets, kept, highest, top_k, row, num_rows, NUM_BLOCKS, BLOCKS_PADDED, NUM_PASSES
                )
        shift = 4 * (NUM_PASSES - 1 - pass_number)
        if (kept >> shift) != (highest >> shift):  # else the pass's bits are known, and those before
            first_pass: tl.constexpr = NUM_PASSES if IS_MASS else 0
            place = (first_pass + pass_number) * num_rows + row
            digits = tl.arange(0, 16)
            total = tl.zeros([16, PIECE], tl.float32)
            if key_of(tl.load(partial_values + row * NUM_BLOCKS + block), SHIFT) >= kept:
                bracket = _bracket_before(
                    sums, brackets, kept, highest, target, shift, place, num_rows, NUM_BLOCKS, BLOCKS_PADDED, IS_MASS
                )
                tl.store(brackets + place, bracket)  # every block that gets here stores the same
                total = _counted(
                    logits, piece_maxima, logits_stride, row, block, kept, bracket, shift, maximum, temperature, digits,
                    total, VOCAB, NUM_BLOCKS, BLOCK, SHIFT, IS_MASS,
                )  # fmt: skip
            tl.store(sums + (place * NUM_BLOCKS + block) * 16 + digits, tl.sum(total, 1))


@triton.jit
def _bracket_before(
    sums, brackets, kept, highest, target, shift, place, num_rows, NUM_BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr, IS_MASS: tl.constexpr,
):  # fmt: skip
    """What is known of the key before a pass: from the bound and the largest logit, or else from the pass before."""
    bracket = (kept >> (shift + 4)) << (shift + 4)
    if (kept >> (shift + 4)) != (highest >> (shift + 4)):
        before = place - num_rows
        bracket = _picked(
            sums + before * NUM_BLOCKS * 16, tl.load(brackets + before), target, shift + 4,
            NUM_BLOCKS, BLOCKS_PADDED, IS_MASS,
        )  # fmt: skip
    return bracket


@triton.jit
def _counted(
    logits, piece_maxima, logits_stride, row, block, kept, bracket, shift, maximum, temperature, digits, total,
    VOCAB: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, IS_MASS: tl.constexpr,
):  # fmt: skip
    """total [16, PIECE] with a block's tokens, as `narrow` sums them: of its pieces only those are read that hold one
    that may be kept."""
    numbers = tl.arange(0, BLOCK // PIECE)
    piece_keys = key_of(tl.load(piece_maxima + (row * NUM_BLOCKS + block) * (BLOCK // PIECE) + numbers), SHIFT)
    wanted = tl.sum(tl.where(piece_keys >= kept, 1 << numbers, 0), 0)  # a bit for each piece
    for number in range(BLOCK // PIECE):
        if (wanted >> number) & 1:
            ids = block * BLOCK + number * PIECE + tl.arange(0, PIECE)
            x = tl.load(logits + row * logits_stride + ids, mask=ids < VOCAB, other=float("-inf"))
            x = x.to(tl.float32)
            key = key_of(x, SHIFT)
            above = (key - bracket) >> shift
            if IS_MASS:
                mass = tl.where(key >= kept, tl.exp((x - maximum) / temperature), 0.0)
                is_counted = (above[None, :] < digits[:, None]) | (digits == 0)[:, None]
                total += tl.where(is_counted, mass[None, :], 0.0)
            else:
                is_counted = (above[None, :] >= digits[:, None]) & (ids < VOCAB)[None, :]
                total += is_counted.to(tl.float32)
    return total


@triton.jit
def find_threshold(
    sums,
    brackets,
    bound,
    maximum,
    top_k,
    drop_mass,
    row,
    num_rows,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    NUM_PASSES: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The key of the least likely token that the row's top-k, then its top-p, keep; the bound when they keep all."""
    highest = key_of(maximum, SHIFT)
    threshold = bound
    if (top_k > 0) & (top_k < VOCAB):
        threshold = _last_of_top_k(
            sums, brackets, bound, highest, top_k, row, num_rows, NUM_BLOCKS, BLOCKS_PADDED, NUM_PASSES
        )
    if (drop_mass >= 0) & (threshold < highest):
        last = (2 * NUM_PASSES - 1) * num_rows + row
        found = _picked(
            sums + last * NUM_BLOCKS * 16, tl.load(brackets + last), drop_mass, 0, NUM_BLOCKS, BLOCKS_PADDED, True
        )
        threshold = tl.maximum(threshold, tl.minimum(found, highest))
    return threshold
