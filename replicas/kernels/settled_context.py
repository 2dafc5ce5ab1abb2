"""A trial, off unless `paged_decode` is told: what attention of rows reads before the kernel in front of it has ended.

A kernel that is launched early (`dependent_launch`) runs beside the one in front of it and beside no other of its
stream: that one's programs let it in behind their own wait, which ends when all in front of them has ended and its
writes are in memory; so do the compiler's. Kernels that are launched in the ordinary way, copies, and the first of a
graph begin when all in front of them has ended, and let nothing in before their own end. So what may still be written
while a program here has not waited is what the one kernel in front writes, and what other streams do. (A kernel of the
compiler's that reads nothing would wait for nothing: decoder layers have none, and the compiler itself relies on it.)

The one in front makes q, k and v of this layer and this step: `rotate_into_pool`, or `write_kv`, or one of the
compiler's, or, with neither norm nor rotary positions, the projection itself. It writes none of this:

- Pieces, slots and positions (with drafts: rows). They are written once a pass, in front of its embedding
  (`WorkSharing.share_out`, `row_feed`, `open_windows`, a copy of the host's): before the projection, in each pass of a
  captured loop too, and whatever of it steps in flight decide (`draft_acceptance`) is written in front of the pass.
- Block tables: by `CudaSlots.apply`, in front of the pass. A slot is one lane's, and the other lane's writes of it have
  been waited for by the host when it changes lanes.

These are read before the wait, and what was read is used. They are read from the L2 cache, where all writes are once
their kernel has ended: a line that this processor has had since the step before is not.

Keys and values are fetched into that cache only, and read after the wait as ever. So nothing depends on who else writes
them: this step's tokens (this kernel, and the one in front those of prompts), a prompt of the other lane, a read from
another card, blocks that come back from the host. All the same only those in front of a row's first query are fetched:
what is behind is written now.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import fetch_some_ahead

_ALIGNED_BYTES = 16  # what can be fetched is a multiple of it, at one


def can_fetch(kv: torch.Tensor) -> bool:
    """Whether every head's keys and values lie so that they can be fetched. kv: as in `paged_decode`."""
    numbers = (kv.shape[4], kv.stride(0), kv.storage_offset())
    return all(number * kv.itemsize % _ALIGNED_BYTES == 0 for number in numbers) and kv.data_ptr() % _ALIGNED_BYTES == 0


@triton.jit
def load_settled(pointer, IS_SETTLED: tl.constexpr):
    """What no kernel that may be running writes. IS_SETTLED: before `wait_for_earlier`; else behind it."""
    return tl.load(pointer, cache_modifier=".cg" if IS_SETTLED else "")


@triton.jit
def fetch_context(
    kv, kv_stride_block, row_table, head, start, end, NUM_TILES: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Have a head's keys and values of the first NUM_TILES tiles from start on brought into the L2 cache, as far as
    they are in front of end. From compute capability 9.0 on."""
    for tile in tl.static_range(NUM_TILES):
        first = start + tile * BLOCK_N
        if first < end:
            places = context_places(
                kv, kv_stride_block, row_table, head, first, end, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N
            )
            fetch_some_ahead(places, HEAD_DIM * kv.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def context_places(
    kv, kv_stride_block, row_table, head, first, end, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Pointers to a head's keys, then values, of BLOCK_N positions from first on; of those behind end, which is beyond
    first, to the last in front of it. [2 * BLOCK_N]: as many as a program has threads, or twice, so that each of them
    fetches something of its own."""
    numbers = tl.arange(0, 2 * BLOCK_N)
    positions = tl.minimum(first + numbers % BLOCK_N, end - 1)
    blocks = tl.load(row_table + positions // BLOCK_SIZE, cache_modifier=".cg").to(tl.int64)
    stride_token: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    inside = (numbers // BLOCK_N * BLOCK_SIZE + positions % BLOCK_SIZE) * stride_token
    return kv + blocks * kv_stride_block + inside + head * HEAD_DIM
