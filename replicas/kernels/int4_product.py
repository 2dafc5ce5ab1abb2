"""A weight matrix of 4 bits times a few rows: `skinny_product` of a quarter of the bytes.

Weights are made numbers of the rows' type in registers, as `replicas.layers.packed_weights` makes them in memory, so
the product is that of the matrix unpacked. Of 32 inputs the first 16 lie in the low halves of 16 bytes and the others
in the high ones: a tile of bytes is two tiles of weights, each with its own rows of the inputs.

A step of few rows has little time for that: at 4 TB/s a multiprocessor gets 60 weights and has 128 operations a clock.
So four bytes at once are put behind the exponent of a number whose last bit is worth 1 (128 in bfloat16, 1024 in
float16), from which one multiply-add of pairs takes that number and the zero point, exactly, and another one scales:
15 operations for eight weights (Kim et al., "Who Says Elephants Can't Run", 2022).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import FETCHED_BYTES, fetch_ahead, launches_early, wait_for_earlier
from replicas.kernels.parts_of_product import store_product
from replicas.kernels.pool_numbers import is_compiled
from replicas.kernels.skinny_product import ProductTile

_HALF = tl.constexpr(16)
_A_FETCH = tl.constexpr(FETCHED_BYTES)
_NUM_FETCHED = 2


def _assembly(magic: int, one: int, kind: str) -> str:
    """Four bytes $4 to four numbers of their low halves, $0 and $1, and four of their high ones, $2 and $3. $5 and $6:
    what is added, for each of four; $7 and $8: what they are multiplied by."""
    lines = [
        "{ .reg .b32 low, high, one, nothing;",
        f"mov.b32 one, 0x{one * 0x00010001:08X};",
        "mov.b32 nothing, 0x80008000;",  # -0, which changes no sum
        "and.b32 low, $4, 0x0F0F0F0F;",
        "shr.b32 high, $4, 4;",
        "and.b32 high, high, 0x0F0F0F0F;",
    ]
    for number in range(4):
        source, order = ("low", "high")[number // 2], ("0x4140", "0x4342")[number % 2]
        lines += [
            f"prmt.b32 ${number}, {source}, 0x{magic * 0x01010101:08X}, {order};",
            f"fma.rn.{kind} ${number}, ${number}, one, ${5 + number % 2};",
            f"fma.rn.{kind} ${number}, ${number}, ${7 + number % 2}, nothing;",
        ]
    return "\n".join([*lines, "}"])


_AS_BFLOAT16 = tl.constexpr(_assembly(0x43, 0x3F80, "bf16x2"))  # 0x43vv is 128 + v
_AS_FLOAT16 = tl.constexpr(_assembly(0x64, 0x3C00, "f16x2"))  # 0x64vv is 1024 + v
_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")


@triton.jit
def _numbers(packed, zero, scale, dtype: tl.constexpr, IS_PACKED: tl.constexpr):
    """(value - zero) * scale, rounded once, of the low and of the high halves. packed uint8 [N, B]; zero, scale [N] of
    the type."""
    if IS_PACKED:
        base: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
        added = tl.broadcast_to((-(zero.to(tl.float32) + base)).to(dtype)[:, None], packed.shape)
        scale = tl.broadcast_to(scale[:, None], packed.shape)
        if dtype == tl.bfloat16:
            low, high = tl.inline_asm_elementwise(
                _AS_BFLOAT16, _REGISTERS, [packed, added, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            low, high = tl.inline_asm_elementwise(
                _AS_FLOAT16, _REGISTERS, [packed, added, scale], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
    else:
        zero, scale = zero.to(tl.float32)[:, None], scale.to(tl.float32)[:, None]
        low = (((packed & 15).to(tl.float32) - zero) * scale).to(dtype)
        high = (((packed >> 4).to(tl.float32) - zero) * scale).to(dtype)
    return low, high


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def _product(
    x, weight, scales, zeros, bias, out, partial, arrived, num_rows, num_out, num_in, num_steps, x_stride, num_groups,
    GROUP_SIZE: tl.constexpr, ZEROS_A_WORD: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_PARTS: tl.constexpr, NUM_FETCHED: tl.constexpr,
    IS_EARLY: tl.constexpr, IS_PACKED: tl.constexpr, IS_WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of outputs over one part of the inputs, num_steps * BLOCK_K of them. A step is within one group."""
    tile, part = tl.program_id(0) // NUM_PARTS, tl.program_id(0) % NUM_PARTS
    features = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, ROWS)
    is_feature, is_row = features < num_out, rows < num_rows
    num_bytes = num_in // 2
    weight_rows = weight + features.to(tl.int64)[:, None] * num_bytes
    begin = part * num_steps * BLOCK_K
    end = tl.minimum(begin + num_steps * BLOCK_K, num_in)
    if NUM_FETCHED > 0:
        inside = weight + tl.minimum(features, num_out - 1).to(tl.int64)[:, None] * num_bytes
        ahead = begin // 2 + tl.arange(0, NUM_FETCHED) * _A_FETCH
        fetch_ahead(inside + tl.minimum(ahead, num_bytes - _A_FETCH)[None, :])
    wait_for_earlier(IS_EARLY)
    x_rows = x + rows[None, :] * x_stride
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    of_step = tl.arange(0, BLOCK_K // 2)
    low_of_step = of_step // _HALF * (2 * _HALF) + of_step % _HALF
    for first in range(begin, end, BLOCK_K):
        low = first + low_of_step
        is_column = low < end
        group = first // GROUP_SIZE
        scale = tl.load(scales + features * num_groups + group, mask=is_feature, other=0.0)
        word = tl.load(
            zeros + features * (num_groups // ZEROS_A_WORD) + group // ZEROS_A_WORD, mask=is_feature, other=0
        )
        zero = (word >> (group % ZEROS_A_WORD * 8)) & 255
        is_weight = is_feature[:, None] & is_column[None, :]
        weights = weight_rows + (first // 2 + of_step)[None, :]
        # A mask costs a choice for each byte.
        packed = tl.load(weights) if IS_WHOLE else tl.load(weights, mask=is_weight, other=0)
        is_input = is_column[:, None] & is_row[None, :]
        v_low = tl.load(x_rows + low[:, None], mask=is_input, other=0.0)
        v_high = tl.load(x_rows + (low + _HALF)[:, None], mask=is_input, other=0.0)
        w_low, w_high = _numbers(packed, zero, scale.to(x.dtype.element_ty), x.dtype.element_ty, IS_PACKED)
        total = tl.dot(w_low, v_low, total, input_precision="ieee")
        total = tl.dot(w_high, v_high, total, input_precision="ieee")
    store_product(
        total, bias, out, partial, arrived, tile, part, features, rows, num_rows, num_out, HAS_BIAS, NUM_PARTS
    )


def int4_product(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int,
    bias: torch.Tensor | None, tile: ProductTile, arrived: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """x [R <= 128, K] times a matrix [N, K] transposed, plus bias [N]: [R, N] in x's type, which is of 16 bits.

    weight, scales, zeros and group_size as in `PackedWeights`, contiguous. Sums in float32. arrived and the rest as in
    `skinny_product`.
    """
    num_rows, num_in = x.shape
    num_out, num_groups = scales.shape
    block_k = min(tile.block_k, group_size & -group_size)
    num_steps = triton.cdiv(triton.cdiv(num_in, tile.num_parts), block_k)
    num_tiles = triton.cdiv(num_out, tile.block_n)
    is_early = launches_early(x.device)
    # The unit that fetches ahead wants addresses of whole 16 bytes, and nothing beyond the matrix.
    is_aligned = weight.data_ptr() % 16 == 0 and num_in % 32 == 0
    # What has less than 4 bytes is not fetched steps ahead: each step would wait for a byte of memory.
    are_words = num_groups % 4 == 0 and zeros.data_ptr() % 4 == 0 and zeros.storage_offset() % 4 == 0
    zeros = zeros.view(torch.int32) if are_words else zeros
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    partial = torch.empty(tile.num_parts if tile.num_parts > 1 else 0, *out.shape, dtype=torch.float32, device=x.device)
    _product[(num_tiles * tile.num_parts,)](
        x, weight, scales, zeros, scales if bias is None else bias, out, partial, arrived, num_rows, num_out, num_in,
        num_steps, x.stride(0), num_groups, GROUP_SIZE=group_size, ZEROS_A_WORD=4 if are_words else 1,
        HAS_BIAS=bias is not None, ROWS=max(16, triton.next_power_of_2(num_rows)), BLOCK_N=tile.block_n,
        BLOCK_K=block_k, NUM_PARTS=tile.num_parts,
        NUM_FETCHED=_NUM_FETCHED if is_early and is_aligned and num_in >= 2 * _A_FETCH.value else 0, IS_EARLY=is_early,
        IS_PACKED=is_compiled(x.device),
        IS_WHOLE=num_out % tile.block_n == 0 and num_in % (tile.num_parts * block_k) == 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=is_early,
    )  # fmt: skip
    return out
