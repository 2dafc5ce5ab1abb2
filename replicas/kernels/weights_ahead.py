"""Weights of the next product, fetched into the L2 cache by a kernel in front of it: a trial, off.

What lies between products (norms, rotation, the weighing of attention's pieces) takes some microseconds of each layer,
in which the memory has nothing to do. A product fetches its first weights before it waits (`fetch_ahead`), but it is
there only once every program of the kernel in front has begun, and one that fetches more takes longer itself. A kernel
that is given an Ahead fetches besides what it does; nothing depends on it. Not in Triton's interpreter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Ahead(NamedTuple):
    """num_pieces of `size` bytes, a multiple of 16, each `apart` bytes behind the one before it, the first one `start`
    bytes behind the first weight, which is 16-byte aligned."""

    num_pieces: int
    apart: int
    size: int
    start: int


Fetched = tuple[torch.Tensor, Ahead]  # contiguous weights, and what of them is to be fetched


@triton.jit
def fetch_share(weights, program, num_programs, AHEAD: tl.constexpr, LANES: tl.constexpr):
    """A program's pieces of an Ahead. weights: pointer to bytes. LANES: threads of a program. Does not wait."""
    for first in range(program * LANES, AHEAD[0], num_programs * LANES):
        piece = tl.minimum(first + tl.arange(0, LANES), AHEAD[0] - 1)
        _fetch(weights + AHEAD[3] + piece.to(tl.int64) * AHEAD[1], AHEAD[2])


@triton.jit
def _fetch(pointers, SIZE: tl.constexpr):
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
        [pointers.to(tl.int64), tl.full(pointers.shape, SIZE, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
