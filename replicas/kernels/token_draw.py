"""Samples one token per row on the GPU, with the parameters that its slot keeps: no host, no shape that depends on them.

The same function of (logits, parameters, seed, choice, position) as `replicas.sampling`, which is its reference:
temperature, top-k, top-p, Gumbel-max with Philox noise. Top-k and top-p need no sort: the least likely logit that they
keep is found by bisection over the bits of its float, a count (top-k) or a mass (top-p) for each bit. Rows that are
greedy or unfiltered leave the kernels they do not need at once, so any mix of rows costs what its rows need.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from replicas.slot_columns import DROP_MASS, LAST_TOKEN, SEED, TEMPERATURE, TOP_K

if os.environ.get("TRITON_INTERPRET") != "1":
    from triton.language.extra import libdevice
else:
    libdevice = None  # Triton's interpreter has none; NumPy's logarithm is exact enough there

_NOT_A_TOKEN = tl.constexpr(-1)
_GREEDY_BELOW = tl.constexpr(1e-5)
_LAST_TOKEN, _SEED, _TOP_K = tl.constexpr(LAST_TOKEN), tl.constexpr(SEED), tl.constexpr(TOP_K)
_TEMPERATURE, _DROP_MASS = tl.constexpr(TEMPERATURE), tl.constexpr(DROP_MASS)
_BLOCK = 4096


@triton.jit
def _float_of(bits):
    """A float32 kept as the low half of an int64."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _key_of(x, SHIFT: tl.constexpr):
    """An integer in the order of the float32 x; SHIFT drops the low bits that its original type does not have."""
    bits = x.to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits | -2147483648)
    return flipped.to(tl.uint32, bitcast=True).to(tl.int64) >> SHIFT


@triton.jit
def _gumbel(word, EXACT: tl.constexpr):
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    if EXACT:
        exponential = -libdevice.log1p(-uniform)
        gumbel = -libdevice.log(exponential)
    else:
        # Kahan's log1p: as exact as the logarithm it is made of.
        rest = 1.0 - uniform
        exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * uniform / tl.where(rest == 1.0, 1.0, 1.0 - rest))
        gumbel = -tl.log(exponential)
    return gumbel


@triton.jit
def _row_maximum(partial_values, row, NUM_BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr):
    index = tl.arange(0, BLOCKS_PADDED)
    values = tl.load(partial_values + row * NUM_BLOCKS + index, mask=index < NUM_BLOCKS, other=float("-inf"))
    # A row of only -inf has no finite maximum, and -inf - -inf would be NaN.
    return tl.maximum(tl.max(values, 0), -3.4028234663852886e38)


@triton.jit
def _best_of_block(
    logits, values, indices, broken, logits_stride, VOCAB: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """The largest logit of each block of the vocabulary, the lowest id of equal ones, and whether one is no number."""
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


@triton.jit
def _find_threshold(
    logits,
    thresholds,
    partial_values,
    state,
    slots,
    logits_stride,
    state_stride,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
) -> None:
    """The key of the least likely token that the row's top-k, then its top-p, keep; 0 when they keep all."""
    row = tl.program_id(0).to(tl.int64)
    params = state + tl.load(slots + row).to(tl.int64) * state_stride
    temperature = _float_of(tl.load(params + _TEMPERATURE))
    top_k = tl.load(params + _TOP_K)
    drop_mass = _float_of(tl.load(params + _DROP_MASS))
    has_top_k = (top_k > 0) & (top_k < VOCAB)
    threshold = tl.zeros([], tl.int64)
    source = logits + row * logits_stride
    if (temperature >= _GREEDY_BELOW) & (has_top_k | (drop_mass >= 0)):
        if has_top_k:
            for step in range(NUM_BITS):
                candidate = threshold | (tl.full([], 1, tl.int64) << (NUM_BITS - 1 - step))
                count = tl.zeros([], tl.int64)
                for first in range(0, VOCAB, BLOCK):
                    ids = first + tl.arange(0, BLOCK)
                    x = tl.load(source + ids, mask=ids < VOCAB, other=float("nan")).to(tl.float32)
                    count += tl.sum(((_key_of(x, SHIFT) >= candidate) & (x == x)).to(tl.int32), 0)
                threshold = tl.where(count >= top_k, candidate, threshold)
        if drop_mass >= 0:
            maximum = _row_maximum(partial_values, row, NUM_BLOCKS, BLOCKS_PADDED)
            kept = threshold
            total = tl.zeros([], tl.float32)
            for first in range(0, VOCAB, BLOCK):
                ids = first + tl.arange(0, BLOCK)
                x = tl.load(source + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
                mass = tl.where(_key_of(x, SHIFT) >= kept, tl.exp((x - maximum) / temperature), 0.0)
                total += tl.sum(mass, 0)
            limit = drop_mass * total
            largest_key = _key_of(maximum, SHIFT)
            found = tl.zeros([], tl.int64)
            for step in range(NUM_BITS):
                candidate = found | (tl.full([], 1, tl.int64) << (NUM_BITS - 1 - step))
                below = tl.zeros([], tl.float32)
                for first in range(0, VOCAB, BLOCK):
                    ids = first + tl.arange(0, BLOCK)
                    x = tl.load(source + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
                    key = _key_of(x, SHIFT)
                    is_below = (key >= kept) & (key < candidate)
                    below += tl.sum(tl.where(is_below, tl.exp((x - maximum) / temperature), 0.0), 0)
                found = tl.where(below <= limit, candidate, found)
            threshold = tl.maximum(threshold, tl.minimum(found, largest_key))
    tl.store(thresholds + row, threshold)


@triton.jit
def _draw_of_block(
    logits,
    values,
    indices,
    thresholds,
    partial_values,
    state,
    slots,
    positions,
    choices,
    logits_stride,
    state_stride,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """For sampled rows: the largest scaled logit plus noise of each block of the vocabulary."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    params = state + tl.load(slots + row).to(tl.int64) * state_stride
    temperature = _float_of(tl.load(params + _TEMPERATURE))
    if temperature >= _GREEDY_BELOW:
        maximum = _row_maximum(partial_values, row, NUM_BLOCKS, BLOCKS_PADDED)
        threshold = tl.load(thresholds + row)
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
            is_kept = (_key_of(x, SHIFT) >= threshold) & (x == x)
            scores = (x - maximum) / temperature + _gumbel(words[lane].to(tl.uint32), EXACT)
            scores = tl.where(is_kept, scores, float("-inf"))
            lanes = tl.where(scores > best, lane, lanes)
            best = tl.maximum(best, scores)
        top, at = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
        lane = tl.sum(tl.where(tl.arange(0, BLOCK // 4) == at, lanes, 0), 0)
        tl.store(values + row * NUM_BLOCKS + block, top)
        tl.store(indices + row * NUM_BLOCKS + block, block * BLOCK + at * 4 + lane)


@triton.jit
def _choose(
    tokens,
    greedy_values,
    greedy_indices,
    drawn_values,
    drawn_indices,
    broken,
    state,
    slots,
    positions,
    state_stride,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
) -> None:
    """The best block's token, NOT_A_TOKEN for a row with a NaN or without any finite logit; it feeds the next step."""
    row = tl.program_id(0)
    params = state + tl.load(slots + row).to(tl.int64) * state_stride
    is_sampled = _float_of(tl.load(params + _TEMPERATURE)) >= _GREEDY_BELOW
    index = tl.arange(0, BLOCKS_PADDED)
    mask = index < NUM_BLOCKS
    places = row * NUM_BLOCKS + index
    greedy = tl.load(greedy_values + places, mask=mask, other=float("-inf"))
    # Of a greedy row nothing was drawn: what is loaded then is chance, and not used.
    values = tl.where(is_sampled, tl.load(drawn_values + places, mask=mask, other=float("-inf")), greedy)
    largest, at = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    place = row * NUM_BLOCKS + at
    chosen = tl.where(is_sampled, tl.load(drawn_indices + place), tl.load(greedy_indices + place))
    has_nan = tl.max(tl.load(broken + places, mask=mask, other=0), 0) > 0
    peak = tl.max(greedy, 0)
    is_finite = tl.abs(peak) < float("inf")
    token = tl.where(has_nan, _NOT_A_TOKEN, tl.where(is_finite, chosen, _NOT_A_TOKEN)).to(tl.int64)
    tl.store(tokens + row, token)
    # No token must still be some id: the next step may be planned already, and is dropped.
    tl.store(params + _LAST_TOKEN, tl.maximum(token, 0), mask=tl.load(positions + row) >= 0)


def draw_tokens(
    logits: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor
) -> torch.Tensor:
    """One token id per row, int64 [R]; -1 (NOT_A_TOKEN) where the logits are no numbers.

    logits [R, V], rows contiguous, of any float type; state: int64 rows of slots, as `replicas.slot_columns`; slots,
    positions (of the token that was fed), choices: int32 [R]. Mutates state: each slot's last token, but for rows at
    position -1, which are padding. Does not block; launches the same kernels whatever the parameters are.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    sizes = {"NUM_BLOCKS": num_blocks, "BLOCKS_PADDED": triton.next_power_of_2(num_blocks)}
    num_bits = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 32}[logits.dtype]
    stride, state_stride = logits.stride(0), state.stride(0)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    greedy_values, drawn_values = empty(num_rows, num_blocks), empty(num_rows, num_blocks)
    greedy_indices = empty(num_rows, num_blocks, dtype=torch.int32)
    drawn_indices, broken = torch.empty_like(greedy_indices), torch.empty_like(greedy_indices)
    thresholds, tokens = empty(num_rows, dtype=torch.int64), empty(num_rows, dtype=torch.int64)
    every_block = (num_rows, num_blocks)
    _best_of_block[every_block](
        logits, greedy_values, greedy_indices, broken, stride, VOCAB=vocab_size, NUM_BLOCKS=num_blocks, BLOCK=_BLOCK
    )
    bits = {"SHIFT": 32 - num_bits, "VOCAB": vocab_size}
    _find_threshold[(num_rows,)](
        logits, thresholds, greedy_values, state, slots, stride, state_stride,
        BLOCK=8192, NUM_BITS=num_bits, num_warps=16, **sizes, **bits,
    )  # fmt: skip
    _draw_of_block[every_block](
        logits, drawn_values, drawn_indices, thresholds, greedy_values, state, slots, positions, choices, stride,
        state_stride, BLOCK=_BLOCK, EXACT=libdevice is not None, **sizes, **bits,
    )  # fmt: skip
    _choose[(num_rows,)](
        tokens, greedy_values, greedy_indices, drawn_values, drawn_indices, broken, state, slots, positions,
        state_stride, **sizes,
    )  # fmt: skip
    return tokens
