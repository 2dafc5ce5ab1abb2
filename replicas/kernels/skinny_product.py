"""A weight matrix times a few rows: the linear layers of a decode step, which mostly read weights.

The weight's rows are the rows of the matrix units' product and the tokens its columns, so that few tokens waste little.
Where a matrix has too few rows to keep every processor reading, its columns are split and the parts summed by a second
kernel, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_out,
    num_in,
    split_len,
    x_stride,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Of one split: [num_rows, num_out], in out's type, or float32 where there are several."""
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_feature, is_row = features < num_out, rows < num_rows
    weight_rows = weight + features.to(tl.int64)[:, None] * weight_stride
    x_rows = x + rows[None, :] * x_stride
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for first in range(split * split_len, tl.minimum((split + 1) * split_len, num_in), BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        is_column = columns < num_in
        w = tl.load(weight_rows + columns[None, :], mask=is_feature[:, None] & is_column[None, :], other=0.0)
        v = tl.load(x_rows + columns[:, None], mask=is_column[:, None] & is_row[None, :], other=0.0)
        total = tl.dot(w, v, total, input_precision="ieee")
    if HAS_BIAS:  # noqa: SIM102 - two conditions of two times: compilation and run
        if split == 0:
            total += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    places = (split * num_rows + rows[None, :]).to(tl.int64) * num_out + features[:, None]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_feature[:, None] & is_row[None, :])


@triton.jit
def _sum_splits(parts, out, size, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    total = tl.load(parts + places, mask=mask, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        total += tl.load(parts + split * size + places, mask=mask, other=0.0)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=mask)


def skinny_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: tuple[int, int, int, int],
    num_splits: int,
) -> torch.Tensor:
    """x [R, K] times weight [N, K] transposed, plus bias [N]: [R, N] in x's type. Rows of both are contiguous.

    tile: features and columns at once, warps and stages of a program. Sums in float32. Does not block.
    """
    num_rows, num_in = x.shape
    num_out = weight.shape[0]
    block_n, block_k, num_warps, num_stages = tile
    rows = min(64, max(16, triton.next_power_of_2(num_rows)))
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    parts = out
    split_len = triton.cdiv(triton.cdiv(num_in, num_splits), block_k) * block_k
    if num_splits > 1:
        parts = torch.empty(num_splits, num_rows, num_out, dtype=torch.float32, device=x.device)
    _product[(triton.cdiv(num_out, block_n), num_splits, triton.cdiv(num_rows, rows))](
        x, weight, weight if bias is None else bias, parts, num_rows, num_out, num_in, split_len, x.stride(0),
        weight.stride(0), HAS_BIAS=bias is not None, ROWS=rows, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if num_splits > 1:
        size = num_rows * num_out
        _sum_splits[(triton.cdiv(size, 1024),)](parts, out, size, NUM_SPLITS=num_splits, BLOCK=1024)
    return out
