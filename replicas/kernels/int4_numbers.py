"""Words of four weights of 4 bits made numbers in registers, as `replicas.layers.packed_weights` makes them in memory.

A step of few rows has little time for that: at 4 TB/s a multiprocessor gets 60 weights and has 128 operations a clock.
Two words are one register. Shifted by a quarter's place and masked, what is left is put behind the exponent of a number
whose last bit is worth 1 (128 in bfloat16, 1024 in float16), from which one multiply-add of pairs takes that number and
the zero point, exactly, and another one scales: 15 operations for eight weights, and nothing moved (Kim et al., "Who
Says Elephants Can't Run", 2022; Frantar et al., "MARLIN", 2024).
"""

from __future__ import annotations

import triton
import triton.language as tl

_QUARTERS = 4


def _assembly(magic: int, one: int, kind: str) -> str:
    """Two words $4 to a pair of numbers for each quarter, $0 to $3. $5 to $8: what is added to each, $9 to $12: what
    it is multiplied by, of both."""
    lines = [
        "{ .reg .b32 quarter, one, nothing;",
        f"mov.b32 one, 0x{one * 0x00010001:08X};",
        "mov.b32 nothing, 0x80008000;",  # -0, which changes no sum
    ]
    for number in range(_QUARTERS):
        source = "quarter" if number else "$4"
        if number:
            lines.append(f"shr.b32 quarter, $4, {4 * number};")
        lines += [
            f"lop3.b32 ${number}, {source}, 0x000F000F, 0x{magic * 0x00010001:08X}, 0xEA;",  # (a & b) | c
            f"fma.rn.{kind} ${number}, ${number}, one, ${5 + number};",
            f"fma.rn.{kind} ${number}, ${number}, ${9 + number}, nothing;",
        ]
    return "\n".join([*lines, "}"])


_AS_BFLOAT16 = tl.constexpr(_assembly(0x4300, 0x3F80, "bf16x2"))  # 0x430v is 128 + v
_AS_FLOAT16 = tl.constexpr(_assembly(0x6400, 0x3C00, "f16x2"))  # 0x640v is 1024 + v
_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r")


@triton.jit
def _scale(factors, dtype: tl.constexpr):
    return (factors & -256).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def _added(factors, dtype: tl.constexpr):
    """-(128 + zero) or -(1024 + zero): their last bits are worth 1, too."""
    if dtype == tl.bfloat16:
        return ((factors & 255) | 0xC300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return ((factors & 255) | 0xE400).to(tl.int16).to(tl.float16, bitcast=True)


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
        a_first, s_first = tl.broadcast_to(_added(f_first, dtype), words.shape), _scale(f_first, dtype)
        a_second, s_second = tl.broadcast_to(_added(f_second, dtype), words.shape), _scale(f_second, dtype)
        a_third, s_third = tl.broadcast_to(_added(f_third, dtype), words.shape), _scale(f_third, dtype)
        a_last, s_last = tl.broadcast_to(_added(f_last, dtype), words.shape), _scale(f_last, dtype)
        s_first, s_second = tl.broadcast_to(s_first, words.shape), tl.broadcast_to(s_second, words.shape)
        s_third, s_last = tl.broadcast_to(s_third, words.shape), tl.broadcast_to(s_last, words.shape)
        if dtype == tl.bfloat16:
            first, second, third, last = tl.inline_asm_elementwise(
                _AS_BFLOAT16, _REGISTERS,
                [words, a_first, a_second, a_third, a_last, s_first, s_second, s_third, s_last],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            first, second, third, last = tl.inline_asm_elementwise(
                _AS_FLOAT16, _REGISTERS,
                [words, a_first, a_second, a_third, a_last, s_first, s_second, s_third, s_last],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        first, second = _number(words, 0, f_first, dtype), _number(words, 4, f_second, dtype)
        third, last = _number(words, 8, f_third, dtype), _number(words, 12, f_last, dtype)
    return first, second, third, last
