"""A matrix times one vector: the linear layers of a decode step of one sequence, which only read weights.

A program has its first weights on their way before it waits for the kernel in front, whose result is the vector.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import launches_early, wait_for_earlier
from replicas.kernels.gate import gate_of_product
from replicas.kernels.parts_of_product import gated_features
from replicas.kernels.pool_numbers import is_compiled


@triton.jit
def _gemv(
    x, weight, bias, onto, out, num_out, weight_stride, NUM_IN: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EARLY: tl.constexpr,
    EVICTION: tl.constexpr, IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N outputs. IS_GATED: each gate with its up next to it."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_out
    if IS_GATED:
        rows = gated_features(tl.program_id(0), num_out, BLOCK_N)
    start = weight + rows.to(tl.int64)[:, None] * weight_stride
    columns = tl.arange(0, BLOCK_K)
    is_column = columns < NUM_IN
    is_weight = is_row[:, None] & is_column[None, :]
    w = tl.load(start + columns[None, :], mask=is_weight, other=0.0, eviction_policy=EVICTION)
    wait_for_earlier(IS_EARLY)
    v = tl.load(x + columns, mask=is_column, other=0.0)
    total = w.to(tl.float32) * v.to(tl.float32)[None, :]
    for first in range(BLOCK_K, NUM_IN, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        is_column = columns < NUM_IN
        is_weight = is_row[:, None] & is_column[None, :]
        w = tl.load(start + columns[None, :], mask=is_weight, other=0.0, eviction_policy=EVICTION)
        v = tl.load(x + columns, mask=is_column, other=0.0)
        total += w.to(tl.float32) * v.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    if IS_GATED:
        gate, up = tl.split(tl.reshape(result, [BLOCK_N // 2, 2]))
        outputs = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        numbers = gate_of_product(gate, up, out.dtype.element_ty, IS_COMPILED)
        tl.store(out + outputs, numbers, mask=outputs < num_out // 2)
    else:
        result = result.to(out.dtype.element_ty)
        if onto is not None:
            result = (result.to(tl.float32) + tl.load(onto + rows, mask=is_row).to(tl.float32)).to(result.dtype)
        tl.store(out + rows, result, mask=is_row)


def _tile_of(num_out: int, num_in: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program: the fastest, or nearly, for every layer of Llama-3.1-8B and Qwen3-0.6B
    behind a norm (H200)."""
    if num_in < 2048:
        return (2, 512, 2) if num_out < 16384 else (4, 512, 4)
    return (2 if num_in <= 8192 else 4), 1024, 4


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: tuple[int, int, int] | None = None,
    eviction: str = "",
    *,
    onto: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """weight [N, K] (rows contiguous) times x (K numbers in a row, of any shape), plus bias: [N], in x's type.

    eviction: of weights from the L2 cache, as in `skinny_product`. onto: N numbers in a row of x's type, that the
    product, rounded to it, is added to. is_gated: half of the outputs are an MLP's gate and half its up: silu(gate) *
    up [N / 2] of the product, rounded to x's type; without onto. Sums in float32. Does not block.
    """
    num_out, num_in = weight.shape
    block_n, block_k, num_warps = tile or _tile_of(num_out, num_in)
    is_early = launches_early(x.device)
    out = torch.empty(num_out // 2 if is_gated else num_out, dtype=x.dtype, device=x.device)
    _gemv[(triton.cdiv(num_out, block_n),)](
        x, weight, weight if bias is None else bias, onto, out, num_out, weight.stride(0), NUM_IN=num_in,
        HAS_BIAS=bias is not None, IS_GATED=is_gated, BLOCK_N=block_n, BLOCK_K=block_k, IS_EARLY=is_early,
        EVICTION=eviction, IS_COMPILED=is_compiled(x.device), num_warps=num_warps, launch_pdl=is_early,
    )  # fmt: skip
    return out
