"""Rows rounded to fp8 or int8, each by the largest number of its own, or of its groups: inputs of 8-bit products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, wait_for_earlier

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


# A group of so many numbers is read once, by one program, and stays in registers: a decode step waits for each of these
# kernels, and a second reading takes it as long again.
_MOST_AT_ONCE = 32768
_NUMBERS_OF_A_WARP = 1024


@triton.jit
def _rounded(number, scale, LARGEST: tl.constexpr, IS_INT: tl.constexpr):
    """To the nearest, ties to even; still float32."""
    number = tl.div_rn(number, scale + tl.zeros_like(number))
    number = tl.minimum(tl.maximum(number, -LARGEST), LARGEST)
    # What is added has its last bit where a rounded number has it: with 1 for int8, for e4m3 an eighth of its power of
    # two, or of the smallest one. So the type is no matter of how a device converts.
    if IS_INT:
        power = 8.0
    else:
        power = (number.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.maximum(power, 0.015625)
    added = power * 1572864.0
    return (number + added) - added


@triton.jit
def _round_rows(
    x, values, scales, num_in, x_stride, num_groups, group_size, LARGEST: tl.constexpr, IS_INT: tl.constexpr,
    IS_ONE_BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, IS_EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One group of one row."""
    wait_for_earlier(IS_EARLY)
    row, group = tl.program_id(0) // num_groups, tl.program_id(0) % num_groups
    begin = group * group_size
    end = tl.minimum(begin + group_size, num_in)
    start = x + row.to(tl.int64) * x_stride
    place = values + row.to(tl.int64) * num_in
    columns = begin + tl.arange(0, BLOCK_K)
    number = tl.load(start + columns, mask=columns < end, other=0.0).to(tl.float32)
    largest = tl.abs(number)
    if not IS_ONE_BLOCK:
        for first in range(begin + BLOCK_K, end, BLOCK_K):
            more = first + tl.arange(0, BLOCK_K)
            another = tl.load(start + more, mask=more < end, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(another))
    most = tl.max(largest, 0)
    scale = tl.where(most > 0.0, tl.div_rn(most, LARGEST), 1.0)
    tl.store(scales + tl.program_id(0), scale)
    tl.store(place + columns, _rounded(number, scale, LARGEST, IS_INT).to(values.dtype.element_ty), mask=columns < end)
    if not IS_ONE_BLOCK:
        for first in range(begin + BLOCK_K, end, BLOCK_K):
            more = first + tl.arange(0, BLOCK_K)
            another = tl.load(start + more, mask=more < end, other=0.0).to(tl.float32)
            another = _rounded(another, scale, LARGEST, IS_INT)
            tl.store(place + more, another.to(values.dtype.element_ty), mask=more < end)


def round_rows(x: torch.Tensor, dtype: torch.dtype, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `replicas.layers.rounding.round_rows`, bit for bit. x [R, K], its rows contiguous. Does not block."""
    num_rows, num_in = x.shape
    num_groups = triton.cdiv(num_in, group_size)
    values = torch.empty(num_rows, num_in, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    is_early = launches_early(x.device)
    block_k = min(_MOST_AT_ONCE, max(32, triton.next_power_of_2(min(group_size, num_in))))
    _round_rows[(num_rows * num_groups,)](
        x, values, scales, num_in, x.stride(0), num_groups, group_size, LARGEST=_LARGEST[dtype],
        IS_INT=dtype is torch.int8, IS_ONE_BLOCK=min(group_size, num_in) <= block_k, BLOCK_K=block_k,
        IS_EARLY=is_early, num_warps=min(32, max(1, block_k // _NUMBERS_OF_A_WARP)), launch_pdl=is_early,
    )  # fmt: skip
    return values, scales
