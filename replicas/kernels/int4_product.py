"""A weight matrix of 4 bits times a few rows: `skinny_product` of a quarter of the bytes.

Weights are made numbers of the rows' type in registers (`int4_numbers`), so the product is that of the matrix unpacked.
A tile of words is four tiles of weights, each with its own columns of the rows. The rows are the first operand of the
matrix units' product: 64 of them as two products of 32, or the compiler takes an instruction whose second operand
comes from memory only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, wait_for_earlier
from replicas.kernels.int4_numbers import int4_numbers
from replicas.kernels.int4_words import CHUNK, QUARTER
from replicas.kernels.parts_of_product import of_parts, store_product
from replicas.kernels.pool_numbers import is_compiled
from replicas.kernels.skinny_product import ProductTile

_CHUNK, _QUARTER = tl.constexpr(CHUNK), tl.constexpr(QUARTER)
_FEWEST_ROWS, _MOST_ROWS = 16, 32  # of one product of the matrix units


@triton.jit
def _quarters(places, is_row, first, num_in, IS_WHOLE: tl.constexpr):
    """Four tiles of inputs of some rows, from input `first` on."""
    if IS_WHOLE:
        v_first = tl.load(places, mask=is_row, other=0.0)
        v_second = tl.load(places + _QUARTER, mask=is_row, other=0.0)
        v_third = tl.load(places + 2 * _QUARTER, mask=is_row, other=0.0)
        v_last = tl.load(places + 3 * _QUARTER, mask=is_row, other=0.0)
    else:
        inputs = first + tl.arange(0, _QUARTER)[None, :]
        v_first = tl.load(places, mask=is_row & (inputs < num_in), other=0.0)
        v_second = tl.load(places + _QUARTER, mask=is_row & (inputs + _QUARTER < num_in), other=0.0)
        v_third = tl.load(places + 2 * _QUARTER, mask=is_row & (inputs + 2 * _QUARTER < num_in), other=0.0)
        v_last = tl.load(places + 3 * _QUARTER, mask=is_row & (inputs + 3 * _QUARTER < num_in), other=0.0)
    return v_first, v_second, v_third, v_last


@triton.jit
def _factors_of(factors, first, features, is_feature, num_out, num_in, GROUP_SIZE: tl.constexpr):
    """Of the quarter from input `first` on, which is of one group. [1, features]."""
    mask = is_feature & (first < num_in)
    return tl.load(factors + first // GROUP_SIZE * num_out + features, mask=mask, other=0)[None, :]


@triton.jit
def _words(weight, chunk, num_out, features, is_feature, IS_WHOLE: tl.constexpr):
    """A chunk's: [a quarter, features]."""
    of_quarter = tl.arange(0, _QUARTER)
    places = weight + (chunk * num_out + features).to(tl.int64)[None, :] * _QUARTER + of_quarter[:, None]
    # A mask costs a choice for each word.
    return tl.load(places) if IS_WHOLE else tl.load(places, mask=is_feature[None, :], other=0)


@triton.jit
def _numbers(
    words, factors, first, features, is_feature, num_out, num_in, dtype: tl.constexpr, GROUP_SIZE: tl.constexpr,
    IS_ONE_GROUP: tl.constexpr, IS_COMPILED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """The four quarters of a chunk's weights, those from input `first` on."""
    if IS_ONE_GROUP:
        of_group = factors + first // GROUP_SIZE * num_out + features
        f_first = (tl.load(of_group) if IS_WHOLE else tl.load(of_group, mask=is_feature, other=0))[None, :]
        f_second, f_third, f_last = f_first, f_first, f_first
    else:
        f_first = _factors_of(factors, first, features, is_feature, num_out, num_in, GROUP_SIZE)
        f_second = _factors_of(factors, first + _QUARTER, features, is_feature, num_out, num_in, GROUP_SIZE)
        f_third = _factors_of(factors, first + 2 * _QUARTER, features, is_feature, num_out, num_in, GROUP_SIZE)
        f_last = _factors_of(factors, first + 3 * _QUARTER, features, is_feature, num_out, num_in, GROUP_SIZE)
    return int4_numbers(words, f_first, f_second, f_third, f_last, dtype, IS_COMPILED)


@triton.jit
def _added(total, places, is_row, first, num_in, w_first, w_second, w_third, w_last, IS_WHOLE: tl.constexpr):
    """total [rows, features] and the product of some rows' inputs with a chunk's weights."""
    v_first, v_second, v_third, v_last = _quarters(places, is_row, first, num_in, IS_WHOLE)
    total = tl.dot(v_first, w_first, total, input_precision="ieee")
    total = tl.dot(v_second, w_second, total, input_precision="ieee")
    total = tl.dot(v_third, w_third, total, input_precision="ieee")
    return tl.dot(v_last, w_last, total, input_precision="ieee")


@triton.jit
def _both_added(
    total, other_total, words, factors, x_rows, x_stride, chunk, features, is_feature, is_row, is_other, num_out,
    num_in, GROUP_SIZE: tl.constexpr, IS_ONE_GROUP: tl.constexpr, ROWS: tl.constexpr, NUM_PRODUCTS: tl.constexpr,
    IS_COMPILED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Both totals and a chunk's products, of which the second one may not be."""
    first = chunk * _CHUNK
    w_first, w_second, w_third, w_last = _numbers(
        words, factors, first, features, is_feature, num_out, num_in, x_rows.dtype.element_ty, GROUP_SIZE,
        IS_ONE_GROUP, IS_COMPILED, IS_WHOLE,
    )  # fmt: skip
    total = _added(total, x_rows + first, is_row, first, num_in, w_first, w_second, w_third, w_last, IS_WHOLE)
    if NUM_PRODUCTS == 2:
        others = x_rows + ROWS * x_stride + first
        other_total = _added(other_total, others, is_other, first, num_in, w_first, w_second, w_third, w_last, IS_WHOLE)
    return total, other_total


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "part_chunks"])
def _product(
    x, weight, factors, bias, onto, out, partial, arrived, num_rows, num_out, num_in, num_chunks, part_chunks, x_stride,
    GROUP_SIZE: tl.constexpr, IS_ONE_GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    NUM_PRODUCTS: tl.constexpr, BLOCK_N: tl.constexpr, NUM_PARTS: tl.constexpr, IS_EARLY: tl.constexpr,
    IS_COMPILED: tl.constexpr, IS_WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of outputs over one part of the inputs, part_chunks of them. IS_ONE_GROUP: whether each chunk is within
    one group. NUM_PRODUCTS: 1, or 2, each of ROWS."""
    tile, part = tl.program_id(0) // NUM_PARTS, tl.program_id(0) % NUM_PARTS
    features = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, ROWS)
    is_feature = features < num_out
    begin = part * part_chunks
    end = tl.minimum(begin + part_chunks, num_chunks)
    wait_for_earlier(IS_EARLY)
    is_row, is_other = (rows < num_rows)[:, None], (rows + ROWS < num_rows)[:, None]
    x_rows = x + rows[:, None] * x_stride + tl.arange(0, _QUARTER)[None, :]
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    other_total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for chunk in range(begin, end):
        words = _words(weight, chunk, num_out, features, is_feature, IS_WHOLE)
        total, other_total = _both_added(
            total, other_total, words, factors, x_rows, x_stride, chunk, features, is_feature, is_row, is_other,
            num_out, num_in, GROUP_SIZE, IS_ONE_GROUP, ROWS, NUM_PRODUCTS, IS_COMPILED, IS_WHOLE,
        )  # fmt: skip
    total = tl.trans(total)
    if NUM_PRODUCTS == 2:
        both = tl.permute(tl.join(total, tl.trans(other_total)), (0, 2, 1))
        total, rows = tl.reshape(both, (BLOCK_N, 2 * ROWS)), tl.arange(0, 2 * ROWS)
    store_product(
        total, bias, out, partial, arrived, tile, part, features, rows, num_rows, num_out, HAS_BIAS, NUM_PARTS, onto
    )


def int4_product(
    x: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor, group_size: int, bias: torch.Tensor | None,
    tile: ProductTile, arrived: torch.Tensor, *, onto: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [R <= 64, K] times a matrix [N, K] transposed, plus bias [N]: [R, N] in x's type, which is of 16 bits.

    weight: `words_of` it; factors: `group_factors` of its scales and zeros; group_size: a multiple of 32; tile.block_k
    is a chunk, whatever it says. All contiguous. Sums in float32. arrived, onto and the rest as in `skinny_product`.
    """
    num_rows, num_in = x.shape
    num_chunks, num_out, _ = weight.shape
    rows = max(_FEWEST_ROWS, triton.next_power_of_2(num_rows))
    is_early = launches_early(x.device)
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    partial = of_parts(tile.num_parts, num_rows, num_out, x.device)
    _product[(triton.cdiv(num_out, tile.block_n) * tile.num_parts,)](
        x, weight, factors, factors if bias is None else bias, onto, out, partial, arrived, num_rows, num_out, num_in,
        num_chunks, triton.cdiv(num_chunks, tile.num_parts), x.stride(0), GROUP_SIZE=group_size,
        IS_ONE_GROUP=group_size % CHUNK == 0, HAS_BIAS=bias is not None, ROWS=min(rows, _MOST_ROWS),
        NUM_PRODUCTS=triton.cdiv(rows, _MOST_ROWS), BLOCK_N=tile.block_n, NUM_PARTS=tile.num_parts,
        IS_EARLY=is_early, IS_COMPILED=is_compiled(x.device),
        IS_WHOLE=num_out % tile.block_n == 0 and num_in % CHUNK == 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=is_early,
    )  # fmt: skip
    return out
