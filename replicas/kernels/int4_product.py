"""A weight matrix of 4 bits times a few rows: `skinny_product` of a quarter of the bytes.

Weights are made numbers of the rows' type in registers (`int4_numbers`), so the product is that of the matrix unpacked.
A tile of words is four tiles of weights, each with its own rows of the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import FETCHED_BYTES, fetch_ahead, launches_early, wait_for_earlier
from replicas.kernels.int4_numbers import int4_numbers
from replicas.kernels.parts_of_product import store_product
from replicas.kernels.pool_numbers import is_compiled
from replicas.kernels.skinny_product import ProductTile

_A_FETCH = tl.constexpr(FETCHED_BYTES // 2)  # words of one
_NUM_FETCHED = 2
_FEWEST_INPUTS = 64  # of a step: a product of the matrix units has 16 at least
_FEWEST_ROWS = 8


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def _product(
    x, weight, factors, bias, out, partial, arrived, num_rows, num_out, num_in, num_steps, x_stride,
    GROUP_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_PARTS: tl.constexpr, NUM_FETCHED: tl.constexpr, IS_EARLY: tl.constexpr, IS_COMPILED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of outputs over one part of the inputs, num_steps * BLOCK_K of them."""
    tile, part = tl.program_id(0) // NUM_PARTS, tl.program_id(0) % NUM_PARTS
    features = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, ROWS)
    is_feature, is_row = features < num_out, rows < num_rows
    num_words = num_in // 4
    weight_rows = weight + features.to(tl.int64)[:, None] * num_words
    begin = part * num_steps * BLOCK_K
    end = tl.minimum(begin + num_steps * BLOCK_K, num_in)
    if NUM_FETCHED > 0:
        inside = weight + tl.minimum(features, num_out - 1).to(tl.int64)[:, None] * num_words
        ahead = begin // 4 + tl.arange(0, NUM_FETCHED) * _A_FETCH
        fetch_ahead(inside + tl.minimum(ahead, num_words - _A_FETCH)[None, :])
    wait_for_earlier(IS_EARLY)
    x_rows = x + rows[None, :] * x_stride
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    of_step = tl.arange(0, BLOCK_K // 4)
    inputs_of_step = of_step // 8 * 32 + of_step % 8
    for first in range(begin, end, BLOCK_K):
        inputs = first + inputs_of_step
        is_input = inputs < end
        weights = weight_rows + (first // 4 + of_step)[None, :]
        # A mask costs a choice for each word.
        is_weight = is_feature[:, None] & is_input[None, :]
        words = tl.load(weights) if IS_WHOLE else tl.load(weights, mask=is_weight, other=0)
        if GROUP_SIZE % BLOCK_K == 0:
            of_group = factors + first // GROUP_SIZE * num_out + features
            made_by = (tl.load(of_group) if IS_WHOLE else tl.load(of_group, mask=is_feature, other=0))[:, None]
        else:
            of_groups = factors + (inputs // GROUP_SIZE)[None, :] * num_out + features[:, None]
            made_by = tl.load(of_groups, mask=is_weight, other=0)
        v_places = x_rows + inputs[:, None]
        is_v = is_row[None, :] if IS_WHOLE else is_input[:, None] & is_row[None, :]
        v_first = tl.load(v_places, mask=is_v, other=0.0)
        v_second = tl.load(v_places + 8, mask=is_v, other=0.0)
        v_third = tl.load(v_places + 16, mask=is_v, other=0.0)
        v_last = tl.load(v_places + 24, mask=is_v, other=0.0)
        w_first, w_second, w_third, w_last = int4_numbers(words, made_by, x.dtype.element_ty, IS_COMPILED)
        total = tl.dot(w_first, v_first, total, input_precision="ieee")
        total = tl.dot(w_second, v_second, total, input_precision="ieee")
        total = tl.dot(w_third, v_third, total, input_precision="ieee")
        total = tl.dot(w_last, v_last, total, input_precision="ieee")
    store_product(
        total, bias, out, partial, arrived, tile, part, features, rows, num_rows, num_out, HAS_BIAS, NUM_PARTS
    )


def int4_product(
    x: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor, group_size: int, bias: torch.Tensor | None,
    tile: ProductTile, arrived: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """x [R <= 128, K] times a matrix [N, K] transposed, plus bias [N]: [R, N] in x's type, which is of 16 bits.

    weight and group_size, a multiple of 32, as in `PackedWeights`; factors: `group_factors` of its scales and zeros;
    all contiguous. Sums in float32. arrived and the rest as in `skinny_product`.
    """
    num_rows, num_in = x.shape
    num_out = factors.shape[1]
    block_k = max(_FEWEST_INPUTS, min(tile.block_k, group_size & -group_size))
    num_steps = triton.cdiv(triton.cdiv(num_in, tile.num_parts), block_k)
    num_tiles = triton.cdiv(num_out, tile.block_n)
    is_early = launches_early(x.device)
    # The unit that fetches ahead wants addresses of whole 16 bytes, and nothing beyond the matrix.
    is_aligned = weight.data_ptr() % 16 == 0 and num_in % 32 == 0
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    partial = torch.empty(tile.num_parts if tile.num_parts > 1 else 0, *out.shape, dtype=torch.float32, device=x.device)
    _product[(num_tiles * tile.num_parts,)](
        x, weight.view(torch.int16), factors, factors if bias is None else bias, out, partial, arrived, num_rows,
        num_out, num_in, num_steps, x.stride(0), GROUP_SIZE=group_size, HAS_BIAS=bias is not None,
        ROWS=max(_FEWEST_ROWS, triton.next_power_of_2(num_rows)), BLOCK_N=tile.block_n, BLOCK_K=block_k,
        NUM_PARTS=tile.num_parts,
        NUM_FETCHED=_NUM_FETCHED if is_early and is_aligned and num_in >= 4 * _A_FETCH.value else 0, IS_EARLY=is_early,
        IS_COMPILED=is_compiled(x.device),
        IS_WHOLE=num_out % tile.block_n == 0 and num_in % (tile.num_parts * block_k) == 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=is_early,
    )  # fmt: skip
    return out
