"""Words of four weights of 4 bits made numbers in registers, as `replicas.layers.packed_weights` makes them in memory.

A step of few rows has little time for that: at 4 TB/s a multiprocessor gets 60 weights and has 128 operations a clock.
Two words are one register. Shifted by a quarter's place and masked, what is left is put behind the exponent of a number
whose last bit is worth 1 (128 in bfloat16, 1024 in float16): a pair of numbers, already where the matrix units want
them, from which one multiply-add of pairs takes that number and the zero point, exactly, and another one scales: 15
operations for eight weights, and nothing moved (Kim et al., "Who Says Elephants Can't Run", 2022; Frantar et al.,
"MARLIN", 2024).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_QUARTERS = 4
_ZERO_BITS = 0xFF


def group_factors(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """What weights of a group are made numbers by, a word each, those of one group for all outputs next to each other:
    scales of 16 or 32 bits and zeros uint8 [N, groups] -> int32 [groups, N].

    The zero point is in the low 8 bits, the scale in float32 without its own there. The last bit that it keeps says
    whether one was set behind it: then it is rounded to a type of 16 bits as the whole one would be (rounding to odd;
    Boldo and Melquiond, "When double rounding is odd", 2005).
    """
    words = scales.float().contiguous().view(torch.int32)
    kept = words & ~_ZERO_BITS
    kept |= ((words & _ZERO_BITS) != 0).int() * (_ZERO_BITS + 1)
    return (kept | zeros.int()).t().contiguous()


def _assembly(magic: int, one: int, kind: str) -> str:
    """Two words $4 to a pair of numbers for each quarter, $0 to $3. $5: what is added, $6: what they are multiplied
    by, of both."""
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
            f"fma.rn.{kind} ${number}, ${number}, one, $5;",
            f"fma.rn.{kind} ${number}, ${number}, $6, nothing;",
        ]
    return "\n".join([*lines, "}"])


_AS_BFLOAT16 = tl.constexpr(_assembly(0x4300, 0x3F80, "bf16x2"))  # 0x430v is 128 + v
_AS_FLOAT16 = tl.constexpr(_assembly(0x6400, 0x3C00, "f16x2"))  # 0x640v is 1024 + v
_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r")


@triton.jit
def int4_numbers(words, factors, dtype: tl.constexpr, IS_COMPILED: tl.constexpr):
    """(value - zero) * scale, rounded once, of each quarter of words, from the lowest one on: four tensors of their
    shape, of dtype, which has 16 bits.

    words: int16. factors: of each word's group, or what is broadcast to that; as `group_factors` has them, zero points
    up to 127. IS_COMPILED: `is_compiled`.
    """
    scale = (factors & -256).to(tl.float32, bitcast=True).to(dtype)
    if IS_COMPILED:
        # -(128 + zero) or -(1024 + zero): their last bits are worth 1, too.
        if dtype == tl.bfloat16:
            added = ((factors & 255) | 0xC300).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            added = ((factors & 255) | 0xE400).to(tl.int16).to(tl.float16, bitcast=True)
        added, scale = tl.broadcast_to(added, words.shape), tl.broadcast_to(scale, words.shape)
        if dtype == tl.bfloat16:
            first, second, third, last = tl.inline_asm_elementwise(
                _AS_BFLOAT16, _REGISTERS, [words, added, scale],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            first, second, third, last = tl.inline_asm_elementwise(
                _AS_FLOAT16, _REGISTERS, [words, added, scale],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        zero, scale = (factors & 255).to(tl.float32), scale.to(tl.float32)
        first = (((words & 15).to(tl.float32) - zero) * scale).to(dtype)
        second = ((((words >> 4) & 15).to(tl.float32) - zero) * scale).to(dtype)
        third = ((((words >> 8) & 15).to(tl.float32) - zero) * scale).to(dtype)
        last = ((((words >> 12) & 15).to(tl.float32) - zero) * scale).to(dtype)
    return first, second, third, last
