"""A weight matrix of 8 bits times a few rows of 8 bits, and their scales: `skinny_product` of half the bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, wait_for_earlier
from replicas.kernels.gate import gate_of_product, halves_of_pairs
from replicas.kernels.parts_of_product import of_parts, store_product
from replicas.kernels.pool_numbers import is_compiled
from replicas.kernels.skinny_product import ProductTile


@triton.jit
def _weights(weight_rows, is_feature, first, end, BLOCK_K: tl.constexpr):
    """A step's, from input `first` on: [features, BLOCK_K]."""
    columns = first + tl.arange(0, BLOCK_K)
    return tl.load(weight_rows + columns[None, :], mask=is_feature[:, None] & (columns < end)[None, :], other=0.0)


@triton.jit
def _added(
    total, w, x_rows, scales, x_scales, first, end, features, rows, is_feature, is_row, num_groups, num_x_groups,
    GROUP_SIZE: tl.constexpr, IS_INT: tl.constexpr, IS_GROUPED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """total [features, rows] and the product of a step's weights w, those from input `first` on."""
    columns = first + tl.arange(0, BLOCK_K)
    v = tl.load(x_rows + columns[:, None], mask=(columns < end)[:, None] & is_row[None, :], other=0.0)
    if IS_INT:
        total = tl.dot(w, v, total, out_dtype=tl.int32)
    elif IS_GROUPED:
        group = first // GROUP_SIZE
        of_w = tl.load(scales + features * num_groups + group, mask=is_feature, other=0.0)
        of_v = tl.load(x_scales + rows * num_x_groups + group, mask=is_row, other=0.0)
        total += tl.dot(w, v, out_dtype=tl.float32) * of_w[:, None] * of_v[None, :]
    else:
        # Tensor cores keep few bits of long sums of fp8: each step's goes into a whole float32. Of shorter ones
        # it would have to be waited for each time.
        total = tl.dot(w, v, total, max_num_imprecise_acc=BLOCK_K, out_dtype=tl.float32)
    return total


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def _product(
    x, x_scales, weight, scales, bias, onto, out, partial, arrived, num_rows, num_out, num_in, num_steps, num_x_groups,
    num_groups, GROUP_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, IS_INT: tl.constexpr, IS_GROUPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_PARTS: tl.constexpr,
    IS_GATED: tl.constexpr, IS_EARLY: tl.constexpr, IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of outputs over one part of the inputs, num_steps * BLOCK_K of them. A step is within one group.

    IS_GATED: each gate with its up next to it; partial: each row's largest number of a tile.
    """
    tile, part = tl.program_id(0) // NUM_PARTS, tl.program_id(0) % NUM_PARTS
    features = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if IS_GATED:
        features = features // 2 + features % 2 * (num_out // 2)
    rows = tl.arange(0, ROWS)
    is_feature, is_row = features < num_out, rows < num_rows
    weight_rows = weight + features.to(tl.int64)[:, None] * num_in
    begin = part * num_steps * BLOCK_K
    end = tl.minimum(begin + num_steps * BLOCK_K, num_in)
    wait_for_earlier(IS_EARLY)
    x_rows = x + rows[None, :] * num_in
    total = tl.zeros([BLOCK_N, ROWS], tl.int32 if IS_INT else tl.float32)
    for first in range(begin, end, BLOCK_K):
        w = _weights(weight_rows, is_feature, first, end, BLOCK_K)
        total = _added(
            total, w, x_rows, scales, x_scales, first, end, features, rows, is_feature, is_row, num_groups,
            num_x_groups, GROUP_SIZE, IS_INT, IS_GROUPED, BLOCK_K,
        )  # fmt: skip
    product = total.to(tl.float32)
    if not IS_GROUPED:
        of_w = tl.load(scales + features, mask=is_feature, other=0.0)
        of_v = tl.load(x_scales + rows * num_x_groups, mask=is_row, other=0.0)
        product = product * of_w[:, None] * of_v[None, :]
    if IS_GATED:
        _store_gated(
            product, bias, out, partial, tile, features, rows, is_row, num_out, HAS_BIAS, ROWS, BLOCK_N, IS_COMPILED
        )
    else:
        store_product(
            product, bias, out, partial, arrived, tile, part, features, rows, num_rows, num_out, HAS_BIAS, NUM_PARTS,
            onto,
        )  # fmt: skip


@triton.jit
def _store_gated(
    product, bias, out, most, tile, features, rows, is_row, num_out, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    """What `round_gated` makes of the product, but for the rounding."""
    if HAS_BIAS:
        product += tl.load(bias + features).to(tl.float32)[:, None]
    gate, up = halves_of_pairs(product, BLOCK_N // 2, ROWS)
    numbers = gate_of_product(gate, up, out.dtype.element_ty, IS_COMPILED)
    outputs = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    places = rows.to(tl.int64)[None, :] * (num_out // 2) + outputs[:, None]
    tl.store(out + places, numbers, mask=is_row[None, :])
    tl.store(most + rows * tl.num_programs(0) + tile, tl.max(tl.abs(numbers.to(tl.float32)), 0), mask=is_row)


def scaled_product(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, group_size: int,
    bias: torch.Tensor | None, tile: ProductTile, arrived: torch.Tensor, dtype: torch.dtype,
    onto: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [R <= 128, K] times weight [N, K] transposed, each by its scales, plus bias [N]: [R, N] of this type.

    Both e4m3 or both int8, contiguous. scales: float32 [N, groups of group_size inputs], x_scales [R, the same] or
    [R or 1, 1]. Groups are of a multiple of 32 inputs, unless there is one. Sums in float32, of integers exact before
    they are scaled. onto: contiguous [R, N] of this type, that the product, rounded to it, is added to. arrived and the
    rest as in `skinny_product`.
    """
    num_rows, num_out = len(x), len(scales)
    out = torch.empty(num_rows, num_out, dtype=dtype, device=x.device)
    partial = of_parts(tile.num_parts, num_rows, num_out, x.device)
    _launch(x, x_scales, weight, scales, group_size, bias, onto, out, partial, arrived, tile, is_gated=False)
    return out


def gated_product(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None,
    tile: ProductTile, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The product of `scaled_product` with weights that `is_gated_tile` is true of, half of them an MLP's gate and half
    its up: silu(gate) * up [R, N / 2] of this type, and float32 [R, N / block_n], each row's largest numbers."""
    num_rows, num_out = len(x), len(scales)
    out = torch.empty(num_rows, num_out // 2, dtype=dtype, device=x.device)
    most = torch.empty(num_rows, num_out // tile.block_n, dtype=torch.float32, device=x.device)
    _launch(x, x_scales, weight, scales, x.shape[1], bias, None, out, most, scales, tile, is_gated=True)
    return out, most


def is_gated_tile(tile: ProductTile, scales: torch.Tensor) -> bool:
    """Whether gates and ups of weights with these scales [N, groups] fill tiles that are no parts."""
    return tile.num_parts == 1 and scales.shape[1] == 1 and scales.shape[0] % tile.block_n == 0


def _launch(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, group_size: int,
    bias: torch.Tensor | None, onto: torch.Tensor | None, out: torch.Tensor, partial: torch.Tensor,
    arrived: torch.Tensor, tile: ProductTile, *, is_gated: bool,
) -> None:  # fmt: skip
    num_rows, num_in = x.shape
    num_out, num_groups = scales.shape
    is_grouped = num_groups > 1 or x_scales.shape[1] > 1
    block_k = min(tile.block_k, group_size & -group_size) if is_grouped else tile.block_k
    if x_scales.shape[1] == 1 and (is_grouped or x_scales.shape[0] < num_rows):
        x_scales = x_scales.expand(num_rows, num_groups).contiguous()
    num_steps = triton.cdiv(triton.cdiv(num_in, tile.num_parts), block_k)
    num_tiles = triton.cdiv(num_out, tile.block_n)
    is_early = launches_early(x.device)
    _product[(num_tiles * tile.num_parts,)](
        x, x_scales, weight, scales, scales if bias is None else bias, onto, out, partial, arrived, num_rows, num_out,
        num_in, num_steps, x_scales.shape[1], num_groups, GROUP_SIZE=group_size if is_grouped else 1,
        HAS_BIAS=bias is not None, IS_INT=x.dtype is torch.int8, IS_GROUPED=is_grouped,
        ROWS=max(16, triton.next_power_of_2(num_rows)), BLOCK_N=tile.block_n, BLOCK_K=block_k,
        NUM_PARTS=tile.num_parts, IS_GATED=is_gated, IS_EARLY=is_early, IS_COMPILED=is_compiled(x.device),
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=is_early,
    )  # fmt: skip
