"""How kernels round the numbers of a row to fp8 or int8: as `replicas.layers.rounding.round_rows` does, bit for bit.

Of numbers of 16 bits a division is three multiplications. All are divided by one number, whose reciprocal is known,
rounded right; the quotient by it is off by two units in the last place at most, and what that leaves of the dividend,
which a fused multiplication gives whole, makes it right (Markstein, "Computation of elementary functions on the IBM
RISC System/6000", 1990). Rows of prompts would wait for the division's instructions, not for memory.
`tests.gpu.test_rounded_rows` has every pair of numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}

# Rows whose largest number is below the first are multiplied by the other one: so small, what a division leaves of its
# dividend has digits that no float32 has. Powers of two, which change no digit.
_SMALL = tl.constexpr(2.0**-60)
_RAISED = tl.constexpr(2.0**100)


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """Of a row, or a group of it, by its largest number without its sign, float32."""
    return tl.where(largest > 0.0, tl.div_rn(largest, LARGEST), 1.0)


@triton.jit
def rounded(number, scale, STORED: tl.constexpr, LARGEST: tl.constexpr, IS_SHORT: tl.constexpr,
            IS_COMPILED: tl.constexpr):  # fmt: skip
    """number, float32, by its row's scale: of type STORED, to the nearest, ties to even. IS_SHORT: it is a number of 16
    bits. IS_COMPILED: as `pool_numbers.is_compiled`."""
    if IS_SHORT:
        number = _short_quotient(number, scale, IS_COMPILED)
    else:
        number = tl.div_rn(number, scale + tl.zeros_like(number))
    if IS_COMPILED and STORED == tl.float8e4nv:  # noqa: SIM300
        return number.to(STORED)  # by an instruction that does two at once, and keeps them within the largest
    number = tl.minimum(tl.maximum(number, -LARGEST), LARGEST)
    # What is added has its last bit where a rounded number has it: with 1 for int8, for e4m3 an eighth of its power of
    # two, or of the smallest one.
    if STORED == tl.int8:  # noqa: SIM300
        power = 8.0
    else:
        power = (number.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.maximum(power, 0.015625)
    added = power * 1572864.0
    return ((number + added) - added).to(STORED)


@triton.jit
def _short_quotient(number, scale, IS_COMPILED: tl.constexpr):
    raised = tl.where(scale < _SMALL, _RAISED, 1.0)
    scale *= raised
    number *= raised
    reciprocal = tl.div_rn(1.0, scale)
    quotient = number * reciprocal
    left = _fused(-quotient, scale, number, IS_COMPILED)
    return _fused(left, reciprocal, quotient, IS_COMPILED)


@triton.jit
def _fused(a, b, c, IS_COMPILED: tl.constexpr):
    """a * b + c, rounded once. The interpreter rounds twice, so there it is computed in twice the digits."""
    if IS_COMPILED:
        return tl.fma(a, b, c)
    else:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
