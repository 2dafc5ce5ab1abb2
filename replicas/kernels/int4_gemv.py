"""A weight matrix of 4 bits times one row: `gemv` of a quarter of the bytes.

Weights are made numbers of the row's type where they were read to (`int4_numbers`), and go from there into the matrix
units, as in MARLIN (Frantar et al., 2024): on CUDA cores they would take twice as many operations as there is time for,
and `int4_product` stores its numbers in shared memory first. A program has its first weights and their factors on their
way before it waits for the kernel in front, and the next ones while it multiplies.

It is taken for granted that the compiler gives each thread of a warp eight words next to each other, and four threads
next to each other an output's; nothing says so but what it computes: see `multiplies_right`. Rows of their own in the
matrix units' columns, which are all the same one here, were slower than `int4_product` (H200: 4 rows 2.87 and 2.82 ms a
step, 16 rows 4.66 and 3.56, 1 row 2.57): their inputs are more bytes than the weights.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, wait_for_earlier
from replicas.kernels.gate import gate_of_product
from replicas.kernels.int4_numbers import int4_numbers
from replicas.kernels.int4_words import CHUNK, QUARTER, group_factors, words_of
from replicas.kernels.pool_numbers import is_compiled

_CHUNK, _QUARTER = tl.constexpr(CHUNK), tl.constexpr(QUARTER)
_OCTET = tl.constexpr(8)  # outputs of a block
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
_REGISTERS = tl.constexpr(",".join(["=&f"] * 16 + ["r"] * 12 + ["f"] * 16))


class Int4GemvTile(NamedTuple):
    """Of a program: num_blocks blocks of 8 outputs, an even number of them, a power of 2 of at most 8; each warp has a
    chunk of inputs a step. num_held: steps whose weights are on their way at once, from before the wait on."""

    num_blocks: int
    num_warps: int
    num_held: int


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
    NUM_GROUPS: tl.constexpr, NUM_BLOCKS: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_GATES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """By each block the words of its pairs of a chunk and an output, int16 [pairs, a quarter], and the factors of their
    quarters: of all, one tensor, where each chunk is within one group, else of each: NUM_GROUPS."""
    pairs, of_quarter = tl.arange(0, NUM_CHUNKS * _OCTET), tl.arange(0, _QUARTER)
    chunks, features = first_chunk + pairs // _OCTET, first_feature + pairs % _OCTET
    # Of the first block at first, so that from there to the others the way is known.
    starts = (pairs // _OCTET * num_out + features)[:, None] * _QUARTER + of_quarter[None, :]
    places = weight + tl.cast(first_chunk, tl.int64) * num_out * _QUARTER + starts
    read: tl.tuple = ()
    for block in tl.static_range(NUM_BLOCKS):
        is_known = (chunks * _CHUNK < NUM_IN) & (features < num_out)
        words = tl.load(places) if IS_WHOLE else tl.load(places, mask=is_known[:, None], other=0)
        found: tl.tuple = ()
        for group in tl.static_range(NUM_GROUPS):
            first = chunks * _CHUNK + _QUARTER * group
            found += (_factors(factors, first, features, is_known, num_out, NUM_IN, GROUP_SIZE, IS_WHOLE),)
        read += ((words, found),)
        if NUM_GATES > 0:
            places += (NUM_GATES if block % 2 == 0 else _OCTET - NUM_GATES) * _QUARTER
            features += NUM_GATES if block % 2 == 0 else _OCTET - NUM_GATES
        else:
            places += _OCTET * _QUARTER
            features += _OCTET
    return read


@triton.jit
def _inputs(
    x, first_chunk, PLACE: tl.constexpr, NUM_IN: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """The quarters that begin PLACE inputs behind the beginning of each chunk: [pairs, a quarter], for each output the
    same, so that each thread reads the inputs of its own words and none are moved."""
    chunks = first_chunk + tl.arange(0, NUM_CHUNKS * _OCTET) // _OCTET
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
def _added(
    totals, x, read, first_chunk, NUM_IN: tl.constexpr, NUM_BLOCKS: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    NUM_GROUPS: tl.constexpr, IS_COMPILED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Each block's total, [pairs, a quarter], and what has been read of it times its inputs."""
    dtype: tl.constexpr = x.dtype.element_ty
    inputs: tl.tuple = ()
    for quarter in tl.static_range(4):
        inputs += (_inputs(x, first_chunk, _QUARTER * quarter, NUM_IN, NUM_CHUNKS, IS_WHOLE),)
    added: tl.tuple = ()
    for block in tl.static_range(0, NUM_BLOCKS, 2):
        words, f = read[block]
        numbers = int4_numbers(words, f[0], f[1 % NUM_GROUPS], f[2 % NUM_GROUPS], f[3 % NUM_GROUPS], dtype, IS_COMPILED)
        words, f = read[block + 1]
        others = int4_numbers(words, f[0], f[1 % NUM_GROUPS], f[2 % NUM_GROUPS], f[3 % NUM_GROUPS], dtype, IS_COMPILED)
        total, other = totals[block], totals[block + 1]
        for quarter in tl.static_range(4):
            if IS_COMPILED:
                total, other = _by_matrix_units(total, other, numbers[quarter], others[quarter], inputs[quarter], dtype)
            else:
                total += numbers[quarter].to(tl.float32) * inputs[quarter].to(tl.float32)
                other += others[quarter].to(tl.float32) * inputs[quarter].to(tl.float32)
        added += (total, other)
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
    x, weight, factors, bias, onto, out, num_out, NUM_IN: tl.constexpr, GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr, NUM_BLOCKS: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    NUM_STEPS: tl.constexpr, NUM_HELD: tl.constexpr, NUM_GATES: tl.constexpr, IS_EARLY: tl.constexpr,
    IS_COMPILED: tl.constexpr, IS_WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """NUM_BLOCKS blocks of outputs, NUM_CHUNKS chunks a step. Steps are written out: between those of a loop the
    compiler moves factors from thread to thread. IS_WHOLE: whether outputs and chunks are of whole programs and steps.
    NUM_GATES: half of the outputs, where every other block is of the ups of the gates in front of it; else 0.
    """
    feature = tl.program_id(0) * (_OCTET * NUM_BLOCKS // (2 if NUM_GATES > 0 else 1))
    held: tl.tuple = ()
    for step in tl.static_range(NUM_HELD):
        held += (
            _read(
                weight, factors, NUM_CHUNKS * step, feature, num_out, NUM_IN, GROUP_SIZE, NUM_GROUPS, NUM_BLOCKS,
                NUM_CHUNKS, NUM_GATES, IS_WHOLE,
            ),
        )  # fmt: skip
    wait_for_earlier(IS_EARLY)
    totals: tl.tuple = ()
    for _ in tl.static_range(NUM_BLOCKS):
        totals += (tl.zeros([NUM_CHUNKS * _OCTET, _QUARTER], tl.float32),)
    for step in tl.static_range(NUM_STEPS):
        if step + NUM_HELD < NUM_STEPS:
            held += (
                _read(
                    weight, factors, NUM_CHUNKS * (step + NUM_HELD), feature, num_out, NUM_IN, GROUP_SIZE, NUM_GROUPS,
                    NUM_BLOCKS, NUM_CHUNKS, NUM_GATES, IS_WHOLE,
                ),
            )  # fmt: skip
        totals = _added(
            totals, x, held[step], NUM_CHUNKS * step, NUM_IN, NUM_BLOCKS, NUM_CHUNKS, NUM_GROUPS, IS_COMPILED, IS_WHOLE
        )
    # Together: warps meet once, not for each block.
    features = feature + tl.arange(0, _OCTET)[:, None] + tl.arange(0, NUM_BLOCKS)[None, :] * _OCTET
    total = tl.reshape(_joined(totals, NUM_BLOCKS), (NUM_CHUNKS, _OCTET, _QUARTER, NUM_BLOCKS))
    result = tl.sum(tl.sum(total, 2), 0)
    if IS_COMPILED:
        result *= 1 / _TIMES
    if NUM_GATES > 0:
        _store_gate(result, bias, out, feature, NUM_GATES, HAS_BIAS, NUM_BLOCKS, IS_COMPILED)
    else:
        is_feature = features < num_out
        if HAS_BIAS:
            result += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)
        product = result.to(out.dtype.element_ty)
        if onto is not None:
            given = tl.load(onto + features, mask=is_feature, other=0.0).to(tl.float32)
            product = (product.to(tl.float32) + given).to(out.dtype.element_ty)
        tl.store(out + features, product, mask=is_feature)


@triton.jit
def _store_gate(
    result, bias, out, first, NUM_GATES: tl.constexpr, HAS_BIAS: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    """result: float32 [8, blocks], of gates and, behind each, of their ups, those of outputs from `first` on."""
    gate, up = tl.split(tl.reshape(result, (_OCTET, NUM_BLOCKS // 2, 2)))
    outputs = first + tl.arange(0, _OCTET)[:, None] + tl.arange(0, NUM_BLOCKS // 2)[None, :] * _OCTET
    is_output = outputs < NUM_GATES
    if HAS_BIAS:
        gate += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
        up += tl.load(bias + NUM_GATES + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + outputs, gate_of_product(gate, up, out.dtype.element_ty, IS_COMPILED), mask=is_output)


def _tile_of(num_out: int, num_in: int) -> Int4GemvTile:
    """The fastest, or nearly, at Llama-3.1-8B's four sizes (H200, by steps)."""
    if num_out >= 16384:
        return Int4GemvTile(4, 4, 1)
    return Int4GemvTile(2, 4 if num_in <= 1024 else 8 if num_in <= 8192 else 16, 2)


def int4_gemv(
    x: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor, group_size: int, bias: torch.Tensor | None,
    tile: Int4GemvTile | None = None, *, onto: torch.Tensor | None = None, is_gated: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x [1, K] times a matrix [N, K] transposed, plus bias [N]: [1, N] in x's type, which is of 16 bits.

    weight: `words_of` it; factors: `group_factors` of its scales and zeros; group_size: a multiple of 32. All
    contiguous. onto, is_gated: as in `gemv`. Sums in float32. Does not block.
    """
    num_in = x.shape[1]
    num_chunks, num_out, _ = weight.shape
    tile = tile or _tile_of(num_out, num_in)
    num_steps = triton.cdiv(num_chunks, tile.num_warps)
    program_outputs = 8 * tile.num_blocks
    is_early = launches_early(x.device)
    out = torch.empty(1, num_out // 2 if is_gated else num_out, dtype=x.dtype, device=x.device)
    _gemv[(triton.cdiv(num_out, program_outputs),)](
        x, weight, factors, factors if bias is None else bias, onto, out, num_out, NUM_IN=num_in, GROUP_SIZE=group_size,
        NUM_GROUPS=1 if group_size % CHUNK == 0 else 4, HAS_BIAS=bias is not None, NUM_BLOCKS=tile.num_blocks,
        NUM_CHUNKS=tile.num_warps, NUM_STEPS=num_steps, NUM_HELD=min(tile.num_held, num_steps),
        NUM_GATES=num_out // 2 if is_gated else 0, IS_EARLY=is_early, IS_COMPILED=is_compiled(x.device),
        IS_WHOLE=num_out % program_outputs == 0 and num_in % CHUNK == 0 and num_chunks % tile.num_warps == 0,
        num_warps=tile.num_warps, launch_pdl=is_early,
    )  # fmt: skip
    return out


@cache
def multiplies_right(device: torch.device) -> bool:
    """Whether `int4_gemv` does on this device, whose compiler may give threads other words: random numbers of few
    digits, whose sums are exact; and their gates. Not before compute capability 8.0, which has its instruction. Blocks
    for seconds, the first time."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        return False
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 16, (32, 1024), generator=generator, dtype=torch.uint8)
    x = torch.randint(-1, 2, (1, 1024), generator=generator).half()
    scales, zeros = torch.full((32, 8), 1 / 16), torch.full((32, 8), 8, dtype=torch.uint8)
    given = x.to(device), words_of(values).to(device), group_factors(scales, zeros).to(device), CHUNK, None
    wanted = x.float() @ (values.float() - 8).T / 16
    gate, up = wanted.chunk(2, 1)
    gates = int4_gemv(*given, is_gated=True).cpu().float()
    are_right = torch.allclose(gates, torch.nn.functional.silu(gate) * up, rtol=1e-3, atol=1e-3)
    return are_right and torch.equal(int4_gemv(*given).cpu().float(), wanted)
