"""Weighted sums of KV blocks, as `replicas.kv.kv_digest` defines them: the weights are computed, not loaded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_part(
    words, block_ids, sums, num_words, words_stride, BLOCK: tl.constexpr, BLOCKS_PER_PART: tl.constexpr
) -> None:
    block = tl.load(block_ids + tl.program_id(0))
    part = tl.program_id(1)
    total = tl.zeros([BLOCK], tl.int64)
    for step in range(BLOCKS_PER_PART):
        index = (part * BLOCKS_PER_PART + step) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words + block * words_stride + index, mask=index < num_words, other=0).to(tl.int64)
        # splitmix64(index) | 1
        state = (index.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB
        weight = (state ^ (state >> 31)) | 1
        total += word * weight.to(tl.int64, bitcast=True)
    tl.atomic_add(sums + tl.program_id(0), tl.sum(total, 0))  # integers: any order gives the same sum


def sum_blocks(words: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """int64 [n]: the weighted sum of each named block. words: int32 [num_blocks, words a block]; block_ids: int64 [n].

    Does not block.
    """
    num_words = words.shape[1]
    sums = torch.zeros(len(block_ids), dtype=torch.int64, device=words.device)
    block, per_part = 1024, 8
    grid = (len(block_ids), triton.cdiv(num_words, block * per_part))
    _sum_part[grid](
        words, block_ids, sums, num_words, words.stride(0), BLOCK=block, BLOCKS_PER_PART=per_part, num_warps=4
    )
    return sums
