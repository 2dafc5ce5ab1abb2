"""An MLP's gate and up made one, silu(gate) * up, of any number of rows: where their product does not.

It only reads and writes: each thread has eight numbers of both on their way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, let_next_in, wait_for_earlier
from replicas.kernels.gate import gated, shortened
from replicas.kernels.pool_numbers import is_compiled

_BLOCK, _WARPS = 1024, 4


@triton.jit(do_not_specialize=["num_blocks"])
def _gated_rows(
    x, out, num_out, num_blocks, x_stride, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr, IS_COMPILED: tl.constexpr
) -> None:
    """A block of a row's outputs."""
    wait_for_earlier(IS_EARLY, LETS_IN=False)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    outputs = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    is_output = outputs < num_out
    start = x + row * x_stride + outputs
    gate = tl.load(start, mask=is_output, other=0.0).to(tl.float32)
    up = tl.load(start + num_out, mask=is_output, other=0.0).to(tl.float32)
    let_next_in(IS_EARLY)
    numbers = shortened(gated(gate, up, IS_COMPILED), out.dtype.element_ty, IS_COMPILED)
    tl.store(out + row * num_out + outputs, numbers, mask=is_output)


def gated_rows(x: torch.Tensor) -> torch.Tensor:
    """x [R, 2 * K]: gate, then up; rows contiguous -> silu(gate) * up [R, K], computed in float32 and rounded to x's
    type. Does not block."""
    num_rows, num_out = x.shape[0], x.shape[1] // 2
    num_blocks = triton.cdiv(num_out, _BLOCK)
    is_early = launches_early(x.device)
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    _gated_rows[(num_rows * num_blocks,)](
        x, out, num_out, num_blocks, x.stride(0), BLOCK=_BLOCK, IS_EARLY=is_early, IS_COMPILED=is_compiled(x.device),
        num_warps=_WARPS, launch_pdl=is_early,
    )  # fmt: skip
    return out
