"""How kernels compute an MLP's gate: silu(gate) * up, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, IS_COMPILED: tl.constexpr):
    """silu(gate) * up. Compiled by the card's own exponential and reciprocal: the compiler's take twice as many
    instructions for numbers beyond 2^126, of which sigmoid is nothing. IS_COMPILED: `pool_numbers.is_compiled`."""
    if IS_COMPILED:
        power = _own("ex2.approx.ftz.f32 $0, $1;", gate * -1.4426950408889634)
        return gate * _own("rcp.approx.ftz.f32 $0, $1;", 1.0 + power) * up
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def gate_of_product(gate, up, kind: tl.constexpr, IS_COMPILED: tl.constexpr):
    """`gated` of a product's float32 outputs once they are of this type, as one."""
    return gated(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), IS_COMPILED).to(kind)


@triton.jit
def halves_of_pairs(product, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """product: [2 * COUNT, ROWS], each gate's outputs with their up's behind them -> both, [COUNT, ROWS]."""
    return tl.split(tl.permute(tl.reshape(product, [COUNT, 2, ROWS]), [0, 2, 1]))


@triton.jit
def _own(instruction: tl.constexpr, number):
    return tl.inline_asm_elementwise(instruction, "=f,f", [number], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def shortened(number, kind: tl.constexpr, IS_COMPILED: tl.constexpr):
    """Of this type of 16 bits. Two bfloat16 at once: one by one a unit makes them that does 16 a clock, and has the
    exponential to do."""
    if IS_COMPILED and kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [number], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return number.to(kind)
