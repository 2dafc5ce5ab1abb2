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
another card, blocks that come back from the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.dependent_launch import fetch_runs_ahead

_ALIGNED_BYTES = 16  # what is fetched is a multiple of it, at one


def fetched_blocks(kv: torch.Tensor, tile_len: int, tiles_ahead: int | None) -> int:
    """How many blocks that many tiles are, of tile_len keys: of a power of two, the next. 0 where the card fetches none
    from such a pool: a head's share of a block, and each block, must be aligned. kv: as in `paged_decode`."""
    share, block = 2 * kv.shape[2] * kv.shape[4] * kv.itemsize, kv.stride(0) * kv.itemsize
    if not tiles_ahead or any(number % _ALIGNED_BYTES for number in (share, block, kv.data_ptr())):
        return 0
    return int(triton.next_power_of_2(triton.cdiv(tiles_ahead * tile_len, kv.shape[2])))


@triton.jit
def load_settled(pointer, IS_SETTLED: tl.constexpr):
    """What no kernel that may be running writes. IS_SETTLED: before `wait_for_earlier`; else behind it."""
    return tl.load(pointer, cache_modifier=".cg" if IS_SETTLED else "")


@triton.jit
def fetch_context(
    kv, kv_stride_block, row_table, head, start, end, NUM_BLOCKS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Have keys and values of the first NUM_BLOCKS blocks from start on brought into the L2 cache, of those that begin
    in front of end. From compute capability 9.0 on."""
    if NUM_BLOCKS > 0:
        places, is_wanted = share_of_blocks(
            kv, kv_stride_block, row_table, head, start, end, NUM_BLOCKS, HEAD_DIM, BLOCK_SIZE
        )
        num_bytes: tl.constexpr = 2 * BLOCK_SIZE * HEAD_DIM * kv.dtype.element_ty.primitive_bitwidth // 8
        fetch_runs_ahead(places, is_wanted, num_bytes)


@triton.jit
def share_of_blocks(
    kv, kv_stride_block, row_table, head, start, end, NUM_BLOCKS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Pointers into blocks, and which of them are some, [NUM_BLOCKS]. A block of a layer is one run of memory, keys of
    all heads, then values: a head's program fetches as much of it as a head has, whoever's it is. Those of the other
    heads are beside it, and fetch the rest. Its own would be a short run for each key."""
    numbers = start // BLOCK_SIZE + tl.arange(0, NUM_BLOCKS)
    is_wanted = numbers * BLOCK_SIZE < end
    blocks = tl.load(row_table + numbers, mask=is_wanted, other=0, cache_modifier=".cg").to(tl.int64)
    return kv + blocks * kv_stride_block + head * (2 * BLOCK_SIZE * HEAD_DIM), is_wanted
