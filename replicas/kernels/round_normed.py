"""A norm whose rows are rounded to fp8 or int8 behind it, perhaps with the sum in front of it: one kernel of three.

Between a layer's products nearly all of a decode step's time is that of launching kernels, and of a prompt's that of
reading and writing rows again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, wait_for_earlier
from replicas.kernels.pool_numbers import is_compiled
from replicas.kernels.round_rows import block_of, warps_of
from replicas.kernels.row_rounding import LARGEST, rounded, scale_of


@triton.jit
def _round_normed(
    x, added, weight, total, values, scales, num_in, epsilon, x_stride, added_stride, HAS_ADDED: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK_K: tl.constexpr, IS_EARLY: tl.constexpr, IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    is_column = columns < num_in
    kind: tl.constexpr = x.dtype.element_ty
    of_column = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    wait_for_earlier(IS_EARLY)
    number = tl.load(x + row * x_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    if HAS_ADDED:
        number += tl.load(added + row * added_stride + columns, mask=is_column, other=0.0).to(tl.float32)
        tl.store(total + row * num_in + columns, number.to(kind), mask=is_column)
    number *= tl.rsqrt(tl.sum(number * number, 0) / num_in + epsilon)
    number = (of_column * number).to(kind).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(number), 0), LARGEST)
    tl.store(scales + row, scale)
    found = rounded(number, scale, values.dtype.element_ty, LARGEST, kind.primitive_bitwidth == 16, IS_COMPILED)
    tl.store(values + row * num_in + columns, found, mask=is_column)


def round_normed(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [R, K <= MOST_AT_ONCE], its rows contiguous; added: the like, or None; weight [K], of the norm.

    x + added in x's type; of that sum RMSNorm, x / root(mean(x^2) + epsilon) * weight, computed in float32 and rounded
    to x's type, as values of this type [R, K] and scales [R, 1]: `round_rows` of it, bit for bit. Without added the
    first of the three is empty. Does not block. Raises ValueError for longer rows.

    As in layers that torch compiles, nothing is rounded on the way.
    """
    num_rows, num_in = x.shape
    values = torch.empty(num_rows, num_in, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    total = torch.empty(num_rows if added is not None else 0, num_in, dtype=x.dtype, device=x.device)
    given = x if added is None else added
    is_early = launches_early(x.device)
    block_k = block_of(num_in)
    _round_normed[(num_rows,)](
        x, given, weight, total, values, scales, num_in, epsilon, x.stride(0), given.stride(0),
        HAS_ADDED=added is not None, LARGEST=LARGEST[dtype], BLOCK_K=block_k, IS_EARLY=is_early,
        IS_COMPILED=is_compiled(x.device), num_warps=warps_of(block_k), launch_pdl=is_early,
    )  # fmt: skip
    return total, values, scales
