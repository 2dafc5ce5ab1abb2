"""A weight matrix of 4 bits times one row: `gemv` of a quarter of the bytes.

Weights are made numbers of the row's type in registers (`int4_numbers`), so the product is that of the matrix unpacked.
Beside reading it is operations that take time: 1.6 a weight to be a number. Two more, to be float32 and multiplied, are
more than a card has while it reads; as matrix units do that, an eighth of one (2.2 to 2.7 in all, as compiled for
sm_90, of 4.3 to 5.0). Unlike a dot of the language's, that moves no weight: each is multiplied where it was read.
A program has its first weights and their factors on their way before it waits for the kernel in front.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, wait_for_earlier
from replicas.kernels.int4_numbers import int4_numbers
from replicas.kernels.int4_words import CHUNK, QUARTER
from replicas.kernels.pool_numbers import is_compiled

_CHUNK, _QUARTER = tl.constexpr(CHUNK), tl.constexpr(QUARTER)
_RUN = tl.constexpr(8)  # words that a thread reads at once: 16 bytes
_TIMES = tl.constexpr(8)  # that a sum is found in a warp: in two columns of each of four threads


def _assembly(kind: str) -> str:
    """Eight numbers of two outputs, $16 to $19 and $20 to $23, times inputs $24 to $27, by matrix units, added to $28
    and $29 and to $36 and $37: $0 and $1, $8 and $9. The rest of both totals is 0.

    Of a warp's 32 threads four next to each other have an output's 32 words of a chunk, 8 each, as they were read. So
    matrix units take a tile's rows: eight of one block and eight of the other. Which four of its 16 inputs a thread has
    is all the same while it brings the vector's numbers for just these; as all threads do, the vector is each column.
    """
    lines = ["{"]
    for place in (0, 2):
        numbers = f"${16 + place}, ${20 + place}, ${17 + place}, ${21 + place}"
        added = "$0, $1, $8, $9" if place else "$28, $29, $36, $37"
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $8, $9}}, {{{numbers}}}, "
            f"{{${24 + place}, ${25 + place}}}, {{{added}}};"
        )
    rest = [*range(2, 8), *range(10, 16)]
    return "\n".join([*lines, *(f"mov.f32 ${number}, 0f00000000;" for number in rest), "}"])


_AS_BFLOAT16, _AS_FLOAT16 = tl.constexpr(_assembly("bf16")), tl.constexpr(_assembly("f16"))
_REGISTERS = tl.constexpr(",".join(["=f"] * 16 + ["r"] * 12 + ["f"] * 16))


class Int4GemvTile(NamedTuple):
    """Of a program: num_blocks blocks of block_n outputs, num_chunks chunks of inputs a step. Powers of 2; num_blocks
    is at most 8.

    num_held: steps whose weights are on their way at once, from before the wait on. by_matrix: whether matrix units
    multiply. They want blocks of 8, which are 16 bytes a thread of a warp, two or more, and a multiple of num_warps
    chunks, so that a warp has one chunk at a time.
    """

    block_n: int
    num_blocks: int
    num_chunks: int
    num_warps: int
    num_held: int = 1
    by_matrix: bool = True


@triton.jit
def _factors(
    factors, first, features, is_known, num_out, NUM_IN: tl.constexpr, GROUP_SIZE: tl.constexpr, IS_WHOLE: tl.constexpr
):  # fmt: skip
    """Of the quarters from each first input on: int32 [pairs, 1]."""
    places = factors + first // GROUP_SIZE * num_out + features
    found = tl.load(places) if IS_WHOLE else tl.load(places, mask=is_known & (first < NUM_IN), other=0)
    return found[:, None]


@triton.jit
def _read(
    weight, factors, first_chunk, first_feature, num_out, NUM_IN: tl.constexpr, GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, NUM_BLOCKS: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """By each block the words of its pairs of a chunk and an output, int16 [pairs, a quarter], and the factors of their
    quarters: of all, one tensor, where each chunk is within one group, else of each: NUM_GROUPS."""
    pairs, of_quarter = tl.arange(0, NUM_CHUNKS * BLOCK_N), tl.arange(0, _QUARTER)
    chunks, features = first_chunk + pairs // BLOCK_N, first_feature + pairs % BLOCK_N
    # Of the first block at first, so that from there to the others the way is known.
    starts = (pairs // BLOCK_N * num_out + features)[:, None] * _QUARTER + of_quarter[None, :]
    places = weight + tl.cast(first_chunk, tl.int64) * num_out * _QUARTER + starts
    read: tl.tuple = ()
    for _ in tl.static_range(NUM_BLOCKS):
        is_known = (chunks * _CHUNK < NUM_IN) & (features < num_out)
        words = tl.load(places) if IS_WHOLE else tl.load(places, mask=is_known[:, None], other=0)
        found: tl.tuple = ()
        for group in tl.static_range(NUM_GROUPS):
            first = chunks * _CHUNK + _QUARTER * group
            found += (_factors(factors, first, features, is_known, num_out, NUM_IN, GROUP_SIZE, IS_WHOLE),)
        read += ((words, found),)
        places += BLOCK_N * _QUARTER
        features += BLOCK_N
    return read


@triton.jit
def _inputs(
    x, first_chunk, PLACE: tl.constexpr, NUM_IN: tl.constexpr, BLOCK_N: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """The quarters that begin PLACE inputs behind the beginning of each chunk: [pairs, a quarter], for each output the
    same, so that each thread reads the inputs of its own words and none are moved."""
    chunks = first_chunk + tl.arange(0, NUM_CHUNKS * BLOCK_N) // BLOCK_N
    inputs = (chunks * _CHUNK)[:, None] + PLACE + tl.arange(0, _QUARTER)[None, :]
    return tl.load(x + inputs) if IS_WHOLE else tl.load(x + inputs, mask=inputs < NUM_IN, other=0.0)


@triton.jit
def _by_matrix_units(total, other_total, numbers, other_numbers, inputs, dtype: tl.constexpr):
    """Totals of two blocks and the products of their numbers with the inputs: see `_assembly`."""
    return tl.inline_asm_elementwise(
        _AS_BFLOAT16 if dtype == tl.bfloat16 else _AS_FLOAT16, _REGISTERS,
        [numbers, other_numbers, inputs, total, other_total],
        dtype=(tl.float32, tl.float32), is_pure=True, pack=_RUN,
    )  # fmt: skip


@triton.jit
def _as_float32(numbers, IS_COMPILED: tl.constexpr):
    """bfloat16 is the upper half of it; the compiler takes each out of its pair before it shifts it."""
    if IS_COMPILED and numbers.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=&r,=r,r", [numbers],
            dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return numbers.to(tl.float32)


@triton.jit
def _added(
    totals, x, read, first_chunk, NUM_IN: tl.constexpr, BLOCK_N: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, NUM_GROUPS: tl.constexpr, BY_MATRIX: tl.constexpr, IS_COMPILED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Each block's total, [pairs, a quarter], and what has been read of it times its inputs."""
    dtype: tl.constexpr = x.dtype.element_ty
    inputs: tl.tuple = ()
    for quarter in tl.static_range(4):
        found = _inputs(x, first_chunk, _QUARTER * quarter, NUM_IN, BLOCK_N, NUM_CHUNKS, IS_WHOLE)
        inputs += (found if BY_MATRIX else _as_float32(found, IS_COMPILED),)
    added: tl.tuple = ()
    for block in tl.static_range(0, NUM_BLOCKS, 2 if BY_MATRIX else 1):
        words, f = read[block]
        numbers = int4_numbers(words, f[0], f[1 % NUM_GROUPS], f[2 % NUM_GROUPS], f[3 % NUM_GROUPS], dtype, IS_COMPILED)
        total = totals[block]
        if BY_MATRIX:
            words, f = read[block + 1]
            others = int4_numbers(
                words, f[0], f[1 % NUM_GROUPS], f[2 % NUM_GROUPS], f[3 % NUM_GROUPS], dtype, IS_COMPILED
            )
            other = totals[block + 1]
            for quarter in tl.static_range(4):
                total, other = _by_matrix_units(total, other, numbers[quarter], others[quarter], inputs[quarter], dtype)
            added += (total, other)
        else:
            for quarter in tl.static_range(4):
                total += _as_float32(numbers[quarter], IS_COMPILED) * inputs[quarter]
            added += (total,)
    return added


@triton.jit
def _joined(totals, COUNT: tl.constexpr):
    """Of each block [pairs, a quarter] -> of all [pairs, a quarter, .., 2, 2]: in their order."""
    for level in tl.static_range(1, 4):
        if COUNT >> level > 0:
            joined: tl.tuple = ()
            for place in tl.static_range(COUNT >> level):
                joined += (tl.join(totals[place], totals[place + (COUNT >> level)]),)
            totals = joined
    return totals[0]


@triton.jit
def _gemv(
    x, weight, factors, bias, out, num_out, NUM_IN: tl.constexpr, GROUP_SIZE: tl.constexpr, NUM_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, NUM_BLOCKS: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    NUM_STEPS: tl.constexpr, NUM_HELD: tl.constexpr, BY_MATRIX: tl.constexpr, IS_EARLY: tl.constexpr,
    IS_COMPILED: tl.constexpr, IS_WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """NUM_BLOCKS blocks of outputs. Steps are written out: between those of a loop the compiler moves factors
    from thread to thread. IS_WHOLE: whether the outputs and the chunks are of whole programs and steps."""
    feature = tl.program_id(0) * (BLOCK_N * NUM_BLOCKS)
    held: tl.tuple = ()
    for step in tl.static_range(NUM_HELD):
        held += (
            _read(
                weight, factors, NUM_CHUNKS * step, feature, num_out, NUM_IN, GROUP_SIZE, NUM_GROUPS, BLOCK_N,
                NUM_BLOCKS, NUM_CHUNKS, IS_WHOLE,
            ),
        )  # fmt: skip
    wait_for_earlier(IS_EARLY)
    totals: tl.tuple = ()
    for _ in tl.static_range(NUM_BLOCKS):
        totals += (tl.zeros([NUM_CHUNKS * BLOCK_N, _QUARTER], tl.float32),)
    for step in tl.static_range(NUM_STEPS):
        if step + NUM_HELD < NUM_STEPS:
            held += (
                _read(
                    weight, factors, NUM_CHUNKS * (step + NUM_HELD), feature, num_out, NUM_IN, GROUP_SIZE, NUM_GROUPS,
                    BLOCK_N, NUM_BLOCKS, NUM_CHUNKS, IS_WHOLE,
                ),
            )  # fmt: skip
        totals = _added(
            totals, x, held[step], NUM_CHUNKS * step, NUM_IN, BLOCK_N, NUM_BLOCKS, NUM_CHUNKS, NUM_GROUPS, BY_MATRIX,
            IS_COMPILED, IS_WHOLE,
        )  # fmt: skip
    # Together: warps meet once, not for each block.
    features = feature + tl.arange(0, BLOCK_N)[:, None] + tl.arange(0, NUM_BLOCKS)[None, :] * BLOCK_N
    total = tl.reshape(_joined(totals, NUM_BLOCKS), (NUM_CHUNKS, BLOCK_N, _QUARTER, NUM_BLOCKS))
    result = tl.sum(tl.sum(total, 2), 0)
    if BY_MATRIX:
        result *= 1 / _TIMES
    is_feature = features < num_out
    if HAS_BIAS:
        result += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)
    tl.store(out + features, result.to(out.dtype.element_ty), mask=is_feature)


def _tile_of(num_out: int, num_in: int) -> Int4GemvTile:
    """By what is compiled, not measured: one wave of programs, with a few kilobytes each on their way."""
    num_warps = 4 if num_in <= 1024 else 8 if num_in <= 8192 else 16
    num_blocks, num_held = (2, 2) if num_out < 16384 else (4, 1)
    return Int4GemvTile(8, num_blocks, num_warps, num_warps, num_held)


def int4_gemv(
    x: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor, group_size: int, bias: torch.Tensor | None,
    tile: Int4GemvTile | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [1, K] times a matrix [N, K] transposed, plus bias [N]: [1, N] in x's type, which is of 16 bits.

    weight: `words_of` it; factors: `group_factors` of its scales and zeros; group_size: a multiple of 32. All
    contiguous. Sums in float32. Does not block.
    """
    num_in = x.shape[1]
    num_chunks, num_out, _ = weight.shape
    tile = tile or _tile_of(num_out, num_in)
    num_steps = triton.cdiv(num_chunks, tile.num_chunks)
    program_outputs = tile.block_n * tile.num_blocks
    if tile.by_matrix and (tile.block_n != 8 or tile.num_blocks % 2 or tile.num_chunks % tile.num_warps):
        raise ValueError(f"matrix units do not multiply by {tile}")
    is_early = launches_early(x.device)
    out = torch.empty(1, num_out, dtype=x.dtype, device=x.device)
    _gemv[(triton.cdiv(num_out, program_outputs),)](
        x, weight, factors, factors if bias is None else bias, out, num_out, NUM_IN=num_in, GROUP_SIZE=group_size,
        NUM_GROUPS=1 if group_size % CHUNK == 0 else 4, HAS_BIAS=bias is not None, BLOCK_N=tile.block_n,
        NUM_BLOCKS=tile.num_blocks, NUM_CHUNKS=tile.num_chunks, NUM_STEPS=num_steps,
        NUM_HELD=min(tile.num_held, num_steps), BY_MATRIX=tile.by_matrix and is_compiled(x.device), IS_EARLY=is_early,
        IS_COMPILED=is_compiled(x.device),
        IS_WHOLE=num_out % program_outputs == 0 and num_in % CHUNK == 0 and num_chunks % tile.num_chunks == 0,
        num_warps=tile.num_warps, launch_pdl=is_early,
    )  # fmt: skip
    return out
