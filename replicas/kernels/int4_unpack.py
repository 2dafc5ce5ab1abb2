"""A matrix of 4 bits made numbers, for products of many rows: `packed_weights.dequantised`, bit for bit.

Torch's own operators take half a dozen passes over it, each of up to 8 bytes a weight; this reads and writes once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HALF = tl.constexpr(16)
_BLOCK_BYTES = 1024  # of a program


@triton.jit
def _unpack(
    values, scales, zeros, out, num_bytes, num_groups, group_size, HAS_ZEROS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Some bytes of one output: two weights each, 16 inputs apart."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_byte = places < num_bytes
    packed = tl.load(values + row * num_bytes + places, mask=is_byte, other=0)
    low = places // _HALF * (2 * _HALF) + places % _HALF
    group = low // group_size  # 32 inputs next to each other are of one
    scale = tl.load(scales + row * num_groups + group, mask=is_byte, other=0.0)
    scale = scale.to(out.dtype.element_ty).to(tl.float32)
    low_number, high_number = (packed & 15).to(tl.float32), (packed >> 4).to(tl.float32)
    if HAS_ZEROS:
        zero = tl.load(zeros + row * num_groups + group, mask=is_byte, other=0).to(tl.float32)
        low_number, high_number = low_number - zero, high_number - zero
    begin = out + row * (2 * num_bytes) + low
    tl.store(begin, (low_number * scale).to(out.dtype.element_ty), mask=is_byte)
    tl.store(begin + _HALF, (high_number * scale).to(out.dtype.element_ty), mask=is_byte)


def int4_unpack(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """[N, K] of this type. values uint8 [N, K / 2], scales float32 and zeros uint8 [N, groups], as in `PackedWeights`;
    contiguous, group_size a multiple of 32. Does not block."""
    num_out, num_bytes = values.shape
    out = torch.empty(num_out, 2 * num_bytes, dtype=dtype, device=values.device)
    block = min(_BLOCK_BYTES, triton.next_power_of_2(num_bytes))
    _unpack[(num_out, triton.cdiv(num_bytes, block))](
        values, scales, scales if zeros is None else zeros, out, num_bytes, scales.shape[1], group_size,
        HAS_ZEROS=zeros is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
