"""A weight matrix times a few rows: linear layers of a decode step, which mostly read weights.

The weight's rows are the rows of the matrix units' product and the tokens its columns, so that few tokens waste little.
Matrices of few outputs are cut along their inputs too, so that every processor reads; the last program of an output
tile to arrive adds the parts, in their order, so that the sum is the same each time (Osama et al., "Stream-K", 2023,
have such parts; here they are of one length).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, wait_for_earlier
from replicas.kernels.parts_of_product import gated_features, of_parts, store_gate, store_product
from replicas.kernels.pool_numbers import is_compiled

MOST_ROWS = 64  # that layers have multiplied by a kernel here, whatever bits their weights have; a library does more


class ProductTile(NamedTuple):
    """How one product is computed: outputs and inputs at once, warps and stages of a program, parts of the inputs."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    num_parts: int


@triton.jit
def _weights(weight_rows, is_feature, first, end, BLOCK_K: tl.constexpr, EVICTION: tl.constexpr):
    """A step's, from input `first` on: [features, BLOCK_K]."""
    columns = first + tl.arange(0, BLOCK_K)
    mask = is_feature[:, None] & (columns < end)[None, :]
    return tl.load(weight_rows + columns[None, :], mask=mask, other=0.0, eviction_policy=EVICTION)


@triton.jit
def _added(total, w, x_rows, is_row, first, end, BLOCK_K: tl.constexpr):
    """total [features, rows] and the product of a step's weights w, those from input `first` on."""
    columns = first + tl.arange(0, BLOCK_K)
    v = tl.load(x_rows + columns[:, None], mask=(columns < end)[:, None] & is_row[None, :], other=0.0)
    return tl.dot(w, v, total, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def _product(
    x, weight, bias, onto, out, partial, arrived, num_rows, num_out, num_in, num_steps, x_stride, weight_stride,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_PARTS: tl.constexpr,
    IS_GATED: tl.constexpr, IS_EARLY: tl.constexpr, EVICTION: tl.constexpr, IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of outputs over one part of the inputs, num_steps * BLOCK_K of them. IS_GATED: each gate with its up
    next to it."""
    tile, part = tl.program_id(0) // NUM_PARTS, tl.program_id(0) % NUM_PARTS
    features = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, ROWS)
    is_feature, is_row = features < num_out, rows < num_rows
    if IS_GATED:
        features = gated_features(tile, num_out, BLOCK_N)
    weight_rows = weight + features.to(tl.int64)[:, None] * weight_stride
    begin = part * num_steps * BLOCK_K
    end = tl.minimum(begin + num_steps * BLOCK_K, num_in)
    wait_for_earlier(IS_EARLY)
    x_rows = x + rows[None, :] * x_stride
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for first in range(begin, end, BLOCK_K):
        w = _weights(weight_rows, is_feature, first, end, BLOCK_K, EVICTION)
        total = _added(total, w, x_rows, is_row, first, end, BLOCK_K)
    if IS_GATED:
        store_gate(
            total, bias, out, partial, arrived, tile, part, rows, num_rows, num_out, HAS_BIAS, NUM_PARTS, BLOCK_N,
            ROWS, IS_COMPILED,
        )  # fmt: skip
    else:
        store_product(
            total, bias, out, partial, arrived, tile, part, features, rows, num_rows, num_out, HAS_BIAS, NUM_PARTS, onto
        )


def skinny_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: ProductTile,
    arrived: torch.Tensor,
    eviction: str = "",
    *,
    onto: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """x [R <= 128, K] times weight [N, K] transposed, plus bias [N]: [R, N] in x's type. Rows of both are contiguous.

    16-bit types. arrived: int32, zeros, at least N / block_n of them, for products one behind the other on one stream;
    zeros again afterwards. eviction: of weights from the L2 cache, as Triton has it; by itself as of all else. onto:
    contiguous [R, N] of x's type, that the product, rounded to it, is added to. is_gated: half of the outputs are an
    MLP's gate and half its up: silu(gate) * up [R, N / 2] of the product, rounded to x's type; without onto. Sums in
    float32. Does not block.
    """
    num_rows, num_in = x.shape
    num_out = weight.shape[0]
    num_steps = triton.cdiv(triton.cdiv(num_in, tile.num_parts), tile.block_k)
    num_tiles = triton.cdiv(num_out, tile.block_n)
    is_early = launches_early(x.device)
    out = torch.empty(num_rows, num_out // 2 if is_gated else num_out, dtype=x.dtype, device=x.device)
    partial = of_parts(tile.num_parts, num_rows, num_out, x.device)
    _product[(num_tiles * tile.num_parts,)](
        x, weight, weight if bias is None else bias, onto, out, partial, arrived, num_rows, num_out, num_in, num_steps,
        x.stride(0), weight.stride(0), HAS_BIAS=bias is not None, ROWS=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, NUM_PARTS=tile.num_parts, IS_GATED=is_gated, IS_EARLY=is_early,
        EVICTION=eviction, IS_COMPILED=is_compiled(x.device), num_warps=tile.num_warps, num_stages=tile.num_stages,
        launch_pdl=is_early,
    )  # fmt: skip
    return out
