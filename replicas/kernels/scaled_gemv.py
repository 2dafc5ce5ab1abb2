"""A weight matrix of e4m3 times one row of e4m3, and their scales: `gemv` of half the bytes.

Without the matrix units, for whose instructions one row would be made sixteen and its weights would go through shared
memory: a program has weights of two steps in registers before it waits for the kernel in front, whose result is the
row. Each product is exact in float32, and so are its factors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, wait_for_earlier
from replicas.kernels.gate import gated
from replicas.kernels.pool_numbers import is_compiled


class GemvTile(NamedTuple):
    """Outputs and inputs at once, and warps, of a program."""

    block_n: int
    block_k: int
    num_warps: int


@triton.jit
def _products(w, x, first, BLOCK_K: tl.constexpr):
    v = tl.load(x + first + tl.arange(0, BLOCK_K))
    return w.to(tl.float32) * v.to(tl.float32)[None, :]


@triton.jit
def _gemv(
    x, x_scales, weight, scales, bias, onto, out, most, num_out, NUM_IN: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EARLY: tl.constexpr,
    IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N outputs. Nothing is masked: of two e4m3 that it knows to be 0, Triton 3.6's assembler makes the upper
    one 2^-6. IS_GATED: each gate with its up next to it; most: each program's largest number. Steps are written
    out: in a loop the compiler would take weights apart and join them again."""
    program = tl.program_id(0)
    features = program * BLOCK_N + tl.arange(0, BLOCK_N)
    if IS_GATED:
        features = features // 2 + features % 2 * (num_out // 2)
    places = weight + features.to(tl.int64)[:, None] * NUM_IN + tl.arange(0, BLOCK_K)[None, :]
    first_weights = tl.load(places)
    if NUM_IN > BLOCK_K:
        following = tl.load(places + BLOCK_K)
    of_w = tl.load(scales + features)
    wait_for_earlier(IS_EARLY)
    total = _products(first_weights, x, 0, BLOCK_K)
    for first in tl.static_range(BLOCK_K, NUM_IN, BLOCK_K):
        w = following
        if first + BLOCK_K < NUM_IN:
            following = tl.load(places + (first + BLOCK_K))
        total += _products(w, x, first, BLOCK_K)
    product = tl.sum(total, 1) * of_w * tl.load(x_scales)
    if HAS_BIAS:
        product += tl.load(bias + features).to(tl.float32)
    result = product.to(out.dtype.element_ty)
    if IS_GATED:
        gate, up = tl.split(tl.reshape(result.to(tl.float32), [BLOCK_N // 2, 2]))
        numbers = gated(gate, up, IS_COMPILED).to(out.dtype.element_ty)
        tl.store(out + program * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2), numbers)
        tl.store(most + program, tl.max(tl.abs(numbers.to(tl.float32)), 0))
    else:
        if onto is not None:
            result = (result.to(tl.float32) + tl.load(onto + features).to(tl.float32)).to(out.dtype.element_ty)
        tl.store(out + features, result)


_OUTPUTS, _INPUTS = 8, 1024  # of whole programs, of whole steps


# The fastest, or nearly, by steps of Llama-3.1-8B (H200). Of fewer gates more largest numbers would have to be read.
_TILE, _GATED_TILE = GemvTile(2, 1024, 2), GemvTile(8, 1024, 4)


def is_single(x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether rows and weights [N, K] with these scales are one row of e4m3, of sizes that need no mask, each with one
    scale."""
    num_out, num_in = weight.shape
    is_whole = num_out % _OUTPUTS == 0 and num_in % _INPUTS == 0
    return is_whole and len(x) == 1 and x.dtype is torch.float8_e4m3fn and x_scales.shape[1] == scales.shape[1] == 1


def scaled_gemv(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype, onto: torch.Tensor | None = None, tile: GemvTile = _TILE,
) -> torch.Tensor:  # fmt: skip
    """x [1, K] times weight [N, K] transposed, each by its scales, plus bias [N]: [1, N] of this type.

    What `is_single` is true of; contiguous. scales: float32 [N, 1], x_scales [1, 1]. Sums in float32. onto: contiguous
    [1, N] of this type, that the product, rounded to it, is added to. Does not block.
    """
    out = torch.empty(1, len(scales), dtype=dtype, device=x.device)
    _launch(x, x_scales, weight, scales, bias, onto, out, scales, tile, is_gated=False)
    return out


def gated_gemv(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype, tile: GemvTile = _GATED_TILE,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The product of `scaled_gemv`, half of whose outputs are an MLP's gate and half its up: silu(gate) * up [1, N / 2]
    of this type, and float32 [1, N / block_n], its largest numbers."""
    num_out = len(scales)
    out = torch.empty(1, num_out // 2, dtype=dtype, device=x.device)
    most = torch.empty(1, num_out // tile.block_n, dtype=torch.float32, device=x.device)
    _launch(x, x_scales, weight, scales, bias, None, out, most, tile, is_gated=True)
    return out, most


def _launch(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None,
    onto: torch.Tensor | None, out: torch.Tensor, most: torch.Tensor, tile: GemvTile, *, is_gated: bool,
) -> None:  # fmt: skip
    num_out, num_in = weight.shape
    assert num_out % tile.block_n == 0
    assert num_in % tile.block_k == 0
    is_early = launches_early(x.device)
    _gemv[(num_out // tile.block_n,)](
        x, x_scales, weight, scales, scales if bias is None else bias, onto, out, most, num_out, NUM_IN=num_in,
        HAS_BIAS=bias is not None, IS_GATED=is_gated, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, IS_EARLY=is_early,
        IS_COMPILED=is_compiled(x.device), num_warps=tile.num_warps, launch_pdl=is_early,
    )  # fmt: skip
