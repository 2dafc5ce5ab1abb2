"""Keys and values as a pool stores them, made numbers of the type that attention computes in."""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl


@cache
def is_compiled(device: torch.device) -> bool:
    """Whether kernels for this device become machine code, so that assembly may be in them: not in the interpreter."""
    return device.type == "cuda" and os.environ.get("TRITON_INTERPRET") != "1"


@triton.jit
def as_queries(query, STORED: tl.constexpr):
    """Queries in the type in which they are multiplied with what a pool of type STORED holds.

    With e4m3 bfloat16 becomes float16: both have all of its numbers and of a product's, but the card makes e4m3 float16
    at once, and bfloat16 of that in two steps more, which take longer than reading the bytes. A query beyond 65,504
    becomes infinite, and its row no number: such an output is never sent.
    """
    if query.dtype == tl.bfloat16 and STORED == tl.float8e4nv:  # noqa: SIM300
        query = query.to(tl.float16)
    return query


@triton.jit
def as_numbers(stored, dtype: tl.constexpr, IS_COMPILED: tl.constexpr):
    """Of a pool of e4m3 the same numbers, exactly; what is none stays none. Of others: they are of the type already.

    Straight to bfloat16 it takes a unit of the card that does 16 a clock, as long as it takes to read them from memory;
    by float16 it does not. And the compiler would convert each where a product wants it, from shared memory byte by
    byte: it moves nothing in front of the assembly, so they are converted as they were read, 16 in a row.
    IS_COMPILED: `is_compiled`.
    """
    if stored.dtype == tl.float8e4nv:
        if IS_COMPILED:
            stored = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [stored], dtype=stored.dtype, is_pure=False, pack=4
            )
        half = stored.to(tl.float16)
        return half if dtype == tl.float16 else half.to(tl.float32).to(dtype)
    else:
        return stored.to(dtype)


@triton.jit
def pairs_as_numbers(words, IS_COMPILED: tl.constexpr):
    """Words of two e4m3 numbers -> float16 of the lower ones and of the upper ones: all numbers as by `as_numbers`.

    words: int16. As numbers of 8 bits they would be moved through shared memory once more, twice as large, on their way
    to the matrix units; words of 16 bits those read as they were stored, and conversion is done in their registers.
    """
    if IS_COMPILED:
        lower, upper = tl.inline_asm_elementwise(
            """{ .reg .b32 sorted; .reg .b16 lower, upper;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {lower, upper}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, lower;
            cvt.rn.f16x2.e4m3x2 $1, upper; }""",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        lower = (words & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        upper = ((words >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return lower, upper
