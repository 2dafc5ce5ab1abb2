"""Rows rounded to fp8 or int8, each by the largest number of its own, or of its groups: inputs of 8-bit products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, wait_for_earlier
from replicas.kernels.pool_numbers import is_compiled
from replicas.kernels.row_rounding import LARGEST, rounded, scale_of

# A group of so many numbers is read once, by one program, and stays in registers: a decode step waits for each of these
# kernels, and a second reading takes it as long again.
MOST_AT_ONCE = 32768
_NUMBERS_OF_A_WARP = 1024
# Of longer rows each warp has twice as many, in few enough registers that three programs share a processor, of which
# one computes while others read. Rows of 14,336 are then rounded as fast as they are read (16,384 of them in 162 us on
# an H200; 274 with 16 warps and as many registers as the compiler likes).
_LONG, _MOST_REGISTERS = 16384, 80


@triton.jit
def _round_rows(
    x, values, scales, num_in, x_stride, num_groups, group_size, LARGEST: tl.constexpr, IS_ONE_BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, IS_EARLY: tl.constexpr, IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    """One group of one row."""
    wait_for_earlier(IS_EARLY)
    stored: tl.constexpr = values.dtype.element_ty
    is_short: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 16
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
    scale = scale_of(tl.max(largest, 0), LARGEST)
    tl.store(scales + tl.program_id(0), scale)
    tl.store(place + columns, rounded(number, scale, stored, LARGEST, is_short, IS_COMPILED), mask=columns < end)
    if not IS_ONE_BLOCK:
        for first in range(begin + BLOCK_K, end, BLOCK_K):
            more = first + tl.arange(0, BLOCK_K)
            another = tl.load(start + more, mask=more < end, other=0.0).to(tl.float32)
            tl.store(place + more, rounded(another, scale, stored, LARGEST, is_short, IS_COMPILED), mask=more < end)


def round_rows(x: torch.Tensor, dtype: torch.dtype, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `replicas.layers.rounding.round_rows`, bit for bit. x [R, K], its rows contiguous. Does not block."""
    num_rows, num_in = x.shape
    num_groups = triton.cdiv(num_in, group_size)
    values = torch.empty(num_rows, num_in, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    is_early = launches_early(x.device)
    block_k = min(MOST_AT_ONCE, max(32, triton.next_power_of_2(min(group_size, num_in))))
    _round_rows[(num_rows * num_groups,)](
        x, values, scales, num_in, x.stride(0), num_groups, group_size, LARGEST=LARGEST[dtype],
        IS_ONE_BLOCK=min(group_size, num_in) <= block_k, BLOCK_K=block_k, IS_EARLY=is_early,
        IS_COMPILED=is_compiled(x.device), launch_pdl=is_early, **program_of(block_k),
    )  # fmt: skip
    return values, scales


def block_of(num_in: int) -> int:
    """Numbers of a program that holds a whole row. Raises ValueError where none does."""
    if num_in > MOST_AT_ONCE:
        raise ValueError(f"rows of {num_in} numbers: a program holds {MOST_AT_ONCE}")
    return max(32, int(triton.next_power_of_2(num_in)))


def warps_of(block_k: int) -> int:
    """Of a program that has so many numbers in registers."""
    return min(32, max(1, block_k // _NUMBERS_OF_A_WARP))


def program_of(block_k: int) -> dict[str, int]:
    """Launch options of a program that reads so many numbers and rounds them."""
    if block_k < _LONG:
        return {"num_warps": warps_of(block_k)}
    return {"num_warps": warps_of(block_k) // 2, "maxnreg": _MOST_REGISTERS}
