"""Digests of KV blocks: the same bytes in every block at both ends, or no KV.

Of each block sum(word[i] * weight[i]) in wrapping 64-bit arithmetic over its 32-bit words (sign-extended).
weight[i] = splitmix64(i) | 1: position decides, odd so that any one changed word changes the sum, and cheap enough for
a kernel to compute instead of load. It guards against faults (a block freed too early, swapped, torn, never written),
not against an attacker.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

# Words digested together: small models have small blocks, and a torch call costs more than the sum of one; but
# the 64-bit products should stay in cache.
_GROUP_WORDS = 1 << 15


class BlockDigester:
    """Digests blocks of one size on one device. Owns about 20 bytes of scratch per word of a group of blocks.

    For one thread at a time.
    """

    def __init__(
        self, words_per_block: int, device: torch.device | str = "cpu", *, is_beside_steps: bool = False
    ) -> None:
        """words_per_block: 32-bit words. is_beside_steps: on CUDA digest_blocks works in a stream of its own, and waits
        for no step: whoever calls it knows that what wrote the blocks has ended. Allocates."""
        if words_per_block < 1:
            raise ValueError("a block has at least one word")
        self.words_per_block = words_per_block
        self._device = torch.device(device)
        self._stream = None
        if is_beside_steps and self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device, priority=-1)  # a prompt's step would keep it waiting
        self._weights = _weights(words_per_block).to(self._device)
        self._blocks_per_group = max(1, _GROUP_WORDS // words_per_block)
        # Kept, because fresh memory costs more to fault in than the whole digest does.
        shape = (self._blocks_per_group, words_per_block)
        self._words = torch.empty(shape, dtype=torch.int32, device=self._device)
        self._products = torch.empty(shape, dtype=torch.int64, device=self._device)

    @classmethod
    def for_pool(cls, pool: torch.Tensor, *, is_beside_steps: bool = False) -> BlockDigester:
        """The digester of a pool's blocks. Raises ValueError when a block is no whole number of 32-bit words."""
        block_bytes = pool[0].numel() * pool.element_size()
        if block_bytes % 4:
            raise ValueError(f"a block of {block_bytes} bytes is not a whole number of 32-bit words")
        return cls(block_bytes // 4, pool.device, is_beside_steps=is_beside_steps)

    def digest_blocks(self, pool: torch.Tensor, block_ids: Sequence[int]) -> bytes:
        """The digests of these blocks of a contiguous pool, as `block_digests.DigestBlocks`. Mutates only its scratch.

        Blocks the calling thread (on CUDA: until its current stream, or the digester's own, has done the work). Raises
        ValueError when the pool's blocks have another size, IndexError for an id outside the pool.
        """
        words = pool.view(pool.shape[0], -1).view(torch.int32)
        if words.shape[1] != self.words_per_block:
            raise ValueError(f"the pool's blocks have {words.shape[1]} words, not {self.words_per_block}")
        if block_ids and (min(block_ids) < 0 or max(block_ids) >= pool.shape[0]):
            raise IndexError("a block id lies outside the pool")
        with self._on_stream():
            sums = self.sum_blocks(words, torch.tensor(block_ids, dtype=torch.int64, device=self._device)).cpu()
        return sums.numpy().astype("<i8", copy=False).tobytes()  # a list of Python's integers takes 0.3 ms more

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def sum_blocks(self, words: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """int64[len(block_ids)]: every block's weighted sum. On CUDA by a kernel that gives exactly these."""
        if self._device.type == "cuda":
            from replicas.kernels import block_digest  # needs triton, which a CPU torch lacks

            kernel_sums: torch.Tensor = block_digest.sum_blocks(words, block_ids)
            return kernel_sums
        sums = torch.zeros(len(block_ids), dtype=torch.int64, device=self._device)
        step = self._blocks_per_group
        for start in range(0, len(block_ids), step):
            group = block_ids[start : start + step]
            picked, products = self._words[: len(group)], self._products[: len(group)]
            torch.index_select(words, 0, group, out=picked)
            torch.mul(picked, self._weights, out=products)  # int32 * int64 is int64, and wraps
            torch.sum(products, dim=1, out=sums[start : start + step])
        return sums


def _weights(num_words: int) -> torch.Tensor:
    """splitmix64(0..num_words - 1) | 1 as int64. torch has no logical shift for int64, hence the masks."""
    state = (torch.arange(num_words, dtype=torch.int64) + 1) * _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shift_right(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shift_right(state, 27)) * _signed(0x94D049BB133111EB)
    return (state ^ _shift_right(state, 31)) | 1


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
