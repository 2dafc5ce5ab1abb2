"""A matrix of 4 bits made numbers, for products of many rows: `packed_weights.dequantised`, bit for bit.

Torch's own operators take half a dozen passes over it, each of up to 8 bytes a weight; this reads and writes once, and
what it writes is a few kilobytes in a row: numbers change places between the processor's threads for that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.int4_numbers import int4_numbers
from replicas.kernels.int4_words import CHUNK, QUARTER
from replicas.kernels.pool_numbers import is_compiled

_CHUNK, _QUARTER = tl.constexpr(CHUNK), tl.constexpr(QUARTER)
_OUTPUTS, _CHUNKS = 8, 8  # of a program


@triton.jit
def _factors_of(factors, first, row, num_out, num_in, GROUP_SIZE: tl.constexpr):
    """Of the quarters from inputs `first` on. [outputs, chunks, 1]."""
    places = factors + (first // GROUP_SIZE)[None, :] * num_out + row[:, None]
    return tl.load(places, mask=(row < num_out)[:, None] & (first < num_in)[None, :], other=0)[:, :, None]


@triton.jit
def _unpack(
    weight, factors, out, num_out, num_in, num_chunks, GROUP_SIZE: tl.constexpr, IS_ONE_GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr, CHUNKS: tl.constexpr, IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    first = chunk * _CHUNK
    places = (chunk[None, :] * num_out + row[:, None]).to(tl.int64)[:, :, None] * _QUARTER
    is_word = ((row < num_out)[:, None] & (chunk < num_chunks)[None, :])[:, :, None]
    words = tl.load(weight + places + tl.arange(0, _QUARTER)[None, None, :], mask=is_word, other=0)
    f_first = _factors_of(factors, first, row, num_out, num_in, GROUP_SIZE)
    if IS_ONE_GROUP:
        f_second, f_third, f_last = f_first, f_first, f_first
    else:
        f_second = _factors_of(factors, first + _QUARTER, row, num_out, num_in, GROUP_SIZE)
        f_third = _factors_of(factors, first + 2 * _QUARTER, row, num_out, num_in, GROUP_SIZE)
        f_last = _factors_of(factors, first + 3 * _QUARTER, row, num_out, num_in, GROUP_SIZE)
    n_first, n_second, n_third, n_last = int4_numbers(
        words, f_first, f_second, f_third, f_last, out.dtype.element_ty, IS_COMPILED
    )
    pairs = tl.join(tl.join(n_first, n_third), tl.join(n_second, n_last))  # of quarter 2 * [3] + [4]
    numbers = tl.reshape(tl.permute(pairs, (0, 1, 3, 4, 2)), (OUTPUTS, CHUNKS * _CHUNK))
    inputs = tl.program_id(1) * CHUNKS * _CHUNK + tl.arange(0, CHUNKS * _CHUNK)
    is_number = (row < num_out)[:, None] & (inputs < num_in)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * num_in + inputs[None, :], numbers, mask=is_number)


def int4_unpack(
    weight: torch.Tensor, factors: torch.Tensor, group_size: int, num_in: int, dtype: torch.dtype
) -> torch.Tensor:
    """[N, num_in] of this type, which is of 16 bits. weight as in `words_of`, factors as in `group_factors`, both
    contiguous; group_size: a multiple of 32. Does not block."""
    num_chunks, num_out, _ = weight.shape
    out = torch.empty(num_out, num_in, dtype=dtype, device=weight.device)
    _unpack[(triton.cdiv(num_out, _OUTPUTS), triton.cdiv(num_chunks, _CHUNKS))](
        weight, factors, out, num_out, num_in, num_chunks, GROUP_SIZE=group_size,
        IS_ONE_GROUP=group_size % CHUNK == 0, OUTPUTS=_OUTPUTS, CHUNKS=_CHUNKS, IS_COMPILED=is_compiled(weight.device),
        num_warps=8,
    )  # fmt: skip
    return out
