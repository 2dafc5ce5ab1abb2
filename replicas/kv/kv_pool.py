"""The paged KV pool: one tensor, block-major, so that one block is one contiguous region over all layers.

kv[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]; index 2 is 0 for keys, 1 for values.
Measured 30-50 times faster to move than per-layer pieces, and free for the attention kernel (design 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one block."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.block_size

    def describe(self) -> str:
        """Text that two pools must share to exchange blocks."""
        return (
            f"{self.num_layers}x2x{self.block_size}x{self.num_kv_heads}x{self.head_dim}:"
            f"{str(self.dtype).removeprefix('torch.')}"
        )


class KvPool:
    """Owns the memory. Only its engine writes it: by attention, by `copy_block`, or by a read it started itself."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (num_blocks, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        # Zeros, not empty: touching the pages now makes a memory shortage show at start, not at first use.
        self.tensor = torch.zeros(shape, dtype=layout.dtype, device=device)

    @property
    def planes_per_block(self) -> int:
        """Keys and values of every layer: a block's plane 2 * layer holds keys, 2 * layer + 1 values."""
        return 2 * self.layout.num_layers

    def planes(self) -> torch.Tensor:
        """View [num_blocks * planes_per_block, block_size * num_kv_heads * head_dim].

        Rows of it are what an index select copies fastest: 6 times as fast as indexing `tensor[:, layer, 0]`, whose
        blocks it copies element by element.
        """
        return self.tensor.view(self.num_blocks * self.planes_per_block, -1)

    def token_rows(self) -> torch.Tensor:
        """View [num_blocks * planes_per_block * block_size, num_kv_heads * head_dim]: one plane's row of a token."""
        return self.tensor.view(self.num_blocks * self.planes_per_block * self.layout.block_size, -1)

    def clear(self, block_ids: torch.Tensor, tails: Sequence[tuple[int, int]]) -> None:
        """Zero whole blocks (int64 [n]), and of each (block, offset) the tokens from offset on. Mutates the pool."""
        if len(block_ids):
            self.tensor.index_fill_(0, block_ids, 0)
        for block_id, offset in tails:
            self.tensor[block_id, :, :, offset:] = 0

    def copy_block(self, source: int, destination: int) -> None:
        """Copy all layers of one block. Mutates the pool."""
        self.tensor[destination].copy_(self.tensor[source])
