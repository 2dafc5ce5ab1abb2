"""A weight matrix times a few rows: linear layers of a decode step with many outputs, which mostly read weights.

The weight's rows are the rows of the matrix units' product and the tokens its columns, so that few tokens waste little.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.cuda.kernels.dependent_launch import launches_early, wait_for_earlier


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x, weight, bias, out, num_rows, num_out, num_in, x_stride, weight_stride, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EARLY: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_earlier(IS_EARLY)
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_feature, is_row = features < num_out, rows < num_rows
    weight_rows = weight + features.to(tl.int64)[:, None] * weight_stride
    x_rows = x + rows[None, :] * x_stride
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for first in range(0, num_in, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        is_column = columns < num_in
        w = tl.load(weight_rows + columns[None, :], mask=is_feature[:, None] & is_column[None, :], other=0.0)
        v = tl.load(x_rows + columns[:, None], mask=is_column[:, None] & is_row[None, :], other=0.0)
        total = tl.dot(w, v, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    places = rows.to(tl.int64)[None, :] * num_out + features[:, None]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_feature[:, None] & is_row[None, :])


def skinny_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: tuple[int, int, int, int]
) -> torch.Tensor:
    """x [R, K] times weight [N, K] transposed, plus bias [N]: [R, N] in x's type. Rows of both are contiguous.

    tile: features and columns at once, warps and stages of a program. Sums in float32. Does not block.
    """
    num_rows, num_in = x.shape
    num_out = weight.shape[0]
    block_n, block_k, num_warps, num_stages = tile
    rows = min(64, max(16, triton.next_power_of_2(num_rows)))
    is_early = launches_early(x.device)
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    _product[(triton.cdiv(num_out, block_n), triton.cdiv(num_rows, rows))](
        x, weight, weight if bias is None else bias, out, num_rows, num_out, num_in, x.stride(0), weight.stride(0),
        HAS_BIAS=bias is not None, ROWS=rows, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps,
        num_stages=num_stages, IS_EARLY=is_early, launch_pdl=is_early,
    )  # fmt: skip
    return out
