"""Host memory for the KV blocks of preempted requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replicas.kv.kv_pool import KvPool
from scheduler.plan import BlockSwap


class HostPool:
    """As many blocks as fit, laid out as the device's; pinned for a GPU, so that copies run beside the host.

    Copies go into the device's stream, like everything else that touches the pool: they come in the order of the
    plans, and the host does not wait for them.
    """

    def __init__(self, pool: KvPool, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = pool
        shape = (num_blocks, *pool.tensor.shape[1:])
        self.tensor = torch.zeros(shape, dtype=pool.tensor.dtype, pin_memory=pool.tensor.is_cuda and num_blocks > 0)

    def swap_out(self, swaps: Sequence[BlockSwap]) -> None:
        """Copy blocks of the pool here, bit by bit. Mutates this."""
        for swap in swaps:
            self.tensor[swap.host].copy_(self._pool.tensor[swap.device], non_blocking=True)

    def swap_in(self, swaps: Sequence[BlockSwap]) -> None:
        """Copy blocks back. Mutates the pool."""
        for swap in swaps:
            self._pool.tensor[swap.device].copy_(self.tensor[swap.host], non_blocking=True)
