"""Products that fetch their first weights line by line: a trial, in the benchmark only.

A bulk prefetch (`fetch_ahead`) takes its address from a register that all threads of a warp share, so one for each
thread is a loop of 32 rounds of seven instructions, of which the processor does some 0.5 us (SASS of sm_90). A prefetch
of one line takes its address from a thread's own register: two of them are two instructions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any
from unittest.mock import patch

import triton
import triton.language as tl

from replicas.kernels import int4_product, scaled_product, skinny_product

_FETCHES = {int4_product: "_FETCHED_CHUNKS", scaled_product: "_NUM_FETCHED", skinny_product: "_NUM_FETCHED"}


@triton.jit
def _fetch_lines(pointers):
    """As `fetch_ahead`: its 256 bytes are two lines of the L2 cache. PTX ISA, prefetch."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; prefetch.global.L2 [$1 + 128]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@contextmanager
def by_line(times: int) -> Iterator[None]:
    """Products that are launched, or captured, within it fetch so, `times` as much as they do now; 0: nothing."""
    with ExitStack() as stack:
        for module, num_fetches in _FETCHES.items():
            kernel = _with_globals(module._product, fetch_ahead=_fetch_lines)  # type: ignore[attr-defined]
            stack.enter_context(patch.object(module, "_product", kernel))
            stack.enter_context(patch.object(module, num_fetches, times * getattr(module, num_fetches)))
        yield


def _with_globals(kernel: Any, **named: Any) -> Any:
    """The same kernel, in which these names mean something else."""
    fn = kernel.fn
    copy = FunctionType(fn.__code__, fn.__globals__ | named, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__annotations__, copy.__module__, copy.__qualname__ = fn.__annotations__, fn.__module__, fn.__qualname__
    return triton.jit(copy, do_not_specialize=["num_rows", "num_steps", "num_chunks", "part_chunks"])
