"""An MLP's gate and up made one, silu(gate) * up, its rows rounded to fp8 or int8 right behind: one kernel of two.

A prompt's widest rows are read once and written once, in 8 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, wait_for_earlier
from replicas.kernels.gate import gated, shortened
from replicas.kernels.pool_numbers import is_compiled
from replicas.kernels.round_rows import block_of, program_of
from replicas.kernels.row_rounding import LARGEST, rounded, scale_of

# Of few rows the time of one counts, to which more warps do less each; of many how many are on their way.
_FEW_ROWS, _WARPS_OF_FEW = 64, 32


@triton.jit
def _round_gated(
    x, values, scales, num_in, x_stride, LARGEST: tl.constexpr, BLOCK_K: tl.constexpr, IS_EARLY: tl.constexpr,
    IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    """One row."""
    wait_for_earlier(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    is_column = columns < num_in
    kind: tl.constexpr = x.dtype.element_ty
    start = x + row * x_stride + columns
    gate = tl.load(start, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(start + num_in, mask=is_column, other=0.0).to(tl.float32)
    number = shortened(gated(gate, up, IS_COMPILED), kind, IS_COMPILED).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(number), 0), LARGEST)
    tl.store(scales + row, scale)
    found = rounded(number, scale, values.dtype.element_ty, LARGEST, kind.primitive_bitwidth == 16, IS_COMPILED)
    tl.store(values + row * num_in + columns, found, mask=is_column)


def round_gated(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, 2 * K], K <= MOST_AT_ONCE: gate, then up; rows contiguous. silu(gate) * up, computed in float32 and rounded
    to x's type, as values of this type [R, K] and scales [R, 1]: `round_rows` of it, bit for bit. Does not block.
    Raises ValueError for longer rows."""
    num_rows, num_in = x.shape[0], x.shape[1] // 2
    values = torch.empty(num_rows, num_in, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    is_early = launches_early(x.device)
    block_k = block_of(num_in)
    _round_gated[(num_rows,)](
        x, values, scales, num_in, x.stride(0), LARGEST=LARGEST[dtype], BLOCK_K=block_k, IS_EARLY=is_early,
        IS_COMPILED=is_compiled(x.device), launch_pdl=is_early,
        **({"num_warps": _WARPS_OF_FEW} if num_rows <= _FEW_ROWS else program_of(block_k)),
    )  # fmt: skip
    return values, scales
