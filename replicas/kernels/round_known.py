"""Few rows rounded to fp8 or int8 by largest numbers that are known, each by many programs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, wait_for_earlier
from replicas.kernels.pool_numbers import is_compiled
from replicas.kernels.row_rounding import LARGEST, rounded, scale_of

_BLOCK_K = 2048


@triton.jit
def _round_known(
    x, most, values, scales, num_in, num_most, LARGEST: tl.constexpr, MOST: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_EARLY: tl.constexpr, IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    """A part of one row."""
    wait_for_earlier(IS_EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns, places = part * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, MOST)
    number = tl.load(x + row * num_in + columns, mask=columns < num_in, other=0.0).to(tl.float32)
    largest = tl.max(tl.load(most + row * num_most + places, mask=places < num_most, other=0.0), 0)
    scale = scale_of(largest, LARGEST)
    tl.store(scales + row, scale)
    is_short: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 16
    found = rounded(number, scale, values.dtype.element_ty, LARGEST, is_short, IS_COMPILED)
    tl.store(values + row * num_in + columns, found, mask=columns < num_in)


def round_known(x: torch.Tensor, most: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, K], contiguous; most: float32 [R, n], of whose row the largest is the largest of x's, without its sign.
    As `round_rows` of whole rows, bit for bit. Does not block."""
    num_rows, num_in = x.shape
    values = torch.empty(num_rows, num_in, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    is_early = launches_early(x.device)
    _round_known[(num_rows, triton.cdiv(num_in, _BLOCK_K))](
        x, most, values, scales, num_in, most.shape[1], LARGEST=LARGEST[dtype],
        MOST=triton.next_power_of_2(most.shape[1]), BLOCK_K=_BLOCK_K, IS_EARLY=is_early,
        IS_COMPILED=is_compiled(x.device), num_warps=4, launch_pdl=is_early,
    )  # fmt: skip
    return values, scales
