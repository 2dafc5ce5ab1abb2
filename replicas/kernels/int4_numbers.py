"""Words of four weights of 4 bits made numbers in registers, as `replicas.layers.packed_weights` makes them in memory.

A step of few rows has little time for that: at 4 TB/s a multiprocessor gets 60 weights and has 128 operations a clock.
Two words are one register. Masked, what is left of a quarter is put behind the exponent of a number whose last bit is
worth 1 (1024 in float16), from which one multiply-add of pairs takes that number and the zero point, exactly, and
another one scales (Kim et al., "Who Says Elephants Can't Run", 2022; Frantar et al., "MARLIN", 2024).

Two quarters of each byte are taken where they are, so that eight weights take one shift: 13 operations, and nothing is
moved. Of float16 the upper quarter lies higher in the same mantissa. That of bfloat16 is too short for it; but its
numbers without an exponent and those with the smallest one are multiples of 2^-133 as the byte counts them, and the
first multiply-add raises them to multiples of 2^-6, which the scale takes back. Exact, too: a scale, which has 8
digits, is below 2^122. A shift for each quarter made steps of Llama-3.1-8B 3.5 % (1 row) and 1.9 % (16) longer, H200.
"""

from __future__ import annotations

import triton
import triton.language as tl

_QUARTERS = 4


def _assembly(magic: int, factors: tuple[int, int], kind: str) -> str:
    """Two words $4 to a pair of numbers for each quarter, $0 to $3. $5 to $8: what is added to each, $9 to $12: what
    it is multiplied by, of both. factors: of the lower and the upper quarter of a byte."""
    lower, upper = (f"0x{factor * 0x00010001:08X}" for factor in factors)
    lines = [
        "{ .reg .b32 bytes, lower, upper, nothing;",
        f"mov.b32 lower, {lower};",
        f"mov.b32 upper, {upper};",
        "mov.b32 nothing, 0x80008000;",  # -0, which changes no sum
        "shr.b32 bytes, $4, 8;",
    ]
    for number in range(_QUARTERS):
        mask, factor = ("0x00F000F0", "upper") if number % 2 else ("0x000F000F", "lower")
        source = "bytes" if number > 1 else "$4"
        lines += [
            f"lop3.b32 ${number}, {source}, {mask}, 0x{magic * 0x00010001:08X}, 0xEA;",  # (a & b) | c
            f"fma.rn.{kind} ${number}, ${number}, {factor}, ${5 + number};",
            f"fma.rn.{kind} ${number}, ${number}, ${9 + number}, nothing;",
        ]
    return "\n".join([*lines, "}"])


_AS_BFLOAT16 = tl.constexpr(_assembly(0, (0x7F00, 0x7D00), "bf16x2"))  # times 2^127, 2^123
_AS_FLOAT16 = tl.constexpr(_assembly(0x6400, (0x3C00, 0x2C00), "f16x2"))  # 0x640v is 1024 + v, 0x64v0 1024 + 16 v
_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r")


@triton.jit
def _scale(factors, dtype: tl.constexpr):
    return (factors & -256).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def _added_and_scale(factors, IS_UPPER: tl.constexpr, shape: tl.constexpr, dtype: tl.constexpr):
    """What is added to a quarter of a byte, and what that is multiplied by, of the words' shape."""
    zero = (factors & 255).to(tl.int16)
    if dtype == tl.bfloat16:
        added = zero.to(tl.bfloat16, bitcast=True) * -(2.0**127)
    elif IS_UPPER:
        added = (-64 - zero).to(dtype)
    else:  # -(1024 + zero): its last bit is worth 1
        added = ((factors & 255) | 0xE400).to(tl.int16).to(dtype, bitcast=True)
    scale = _scale(factors, dtype) * 64.0 if dtype == tl.bfloat16 else _scale(factors, dtype)
    return tl.broadcast_to(added, shape), tl.broadcast_to(scale, shape)


@triton.jit
def _number(words, PLACE: tl.constexpr, factors, dtype: tl.constexpr):
    value, zero = ((words >> PLACE) & 15).to(tl.float32), (factors & 255).to(tl.float32)
    return ((value - zero) * _scale(factors, dtype).to(tl.float32)).to(dtype)


@triton.jit
def int4_numbers(words, f_first, f_second, f_third, f_last, dtype: tl.constexpr, IS_COMPILED: tl.constexpr):
    """(value - zero) * scale, rounded once, of each quarter of words, from the lowest one on: four tensors of their
    shape, of dtype, which has 16 bits.

    words: int16. Factors of each quarter, as `group_factors` has them, int32 of the words' shape or what is broadcast
    to it; zero points up to 127. IS_COMPILED: `is_compiled`.
    """
    if IS_COMPILED:
        a_first, s_first = _added_and_scale(f_first, False, words.shape, dtype)
        a_second, s_second = _added_and_scale(f_second, True, words.shape, dtype)
        a_third, s_third = _added_and_scale(f_third, False, words.shape, dtype)
        a_last, s_last = _added_and_scale(f_last, True, words.shape, dtype)
        given = [words, a_first, a_second, a_third, a_last, s_first, s_second, s_third, s_last]
        if dtype == tl.bfloat16:
            first, second, third, last = tl.inline_asm_elementwise(
                _AS_BFLOAT16, _REGISTERS, given,
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            first, second, third, last = tl.inline_asm_elementwise(
                _AS_FLOAT16, _REGISTERS, given,
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        first, second = _number(words, 0, f_first, dtype), _number(words, 4, f_second, dtype)
        third, last = _number(words, 8, f_third, dtype), _number(words, 12, f_last, dtype)
    return first, second, third, last
