"""Host memory for KV blocks: of requests that gave way, and cached ones.

Each block is digested when it goes out and when it comes back: what is wrong by then (memory does fail) is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from replicas.device_copy import to_device
from replicas.kv.kv_digest import BlockDigester
from replicas.kv.kv_pool import KvPool
from scheduler.plan import BlockSwap, StepPlan


@dataclass(frozen=True, slots=True)
class MovedBlocks:
    """What a step has moved, or is moving. differing: swaps, and of each, in memory of the host, whether what came back
    is not what went out; there when all of `done` has happened."""

    differing: tuple[tuple[tuple[BlockSwap, ...], Tensor], ...] = ()
    done: tuple[torch.cuda.Event, ...] = ()

    @property
    def is_on_the_way(self) -> bool:
        return bool(self.done)

    def damaged(self) -> tuple[BlockSwap, ...]:
        """Those that brought something else than went out. Blocks until all of them have ended."""
        for event in self.done:
            event.synchronize()
        return tuple([swap for swaps, differ in self.differing for swap in compress(swaps, differ.tolist())])


class HostPool:
    """As many blocks as fit, laid out as the device's; pinned for a GPU, so that copies run beside the host.

    Copies for requests that gave way are in the device's stream, like everything else that touches the pool, and come
    in the order of the plans. Those of cached blocks are in a stream of their own, behind what was launched before the
    step and beside the step itself: nothing in it depends on them. The host waits for neither. One thread.
    """

    def __init__(self, pool: KvPool, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = pool
        device = pool.tensor.device
        shape = (num_blocks, *pool.tensor.shape[1:])
        self.tensor = torch.zeros(shape, dtype=pool.tensor.dtype, pin_memory=pool.tensor.is_cuda and num_blocks > 0)
        self._digester = BlockDigester.for_pool(pool.tensor) if num_blocks else None
        self._digests = torch.zeros(num_blocks, dtype=torch.int64, device=device)  # of what went out
        self._beside = torch.cuda.Stream(device) if pool.tensor.is_cuda and num_blocks else None

    def move(self, plan: StepPlan) -> MovedBlocks | None:
        """Everything that the plan moves to host memory and back, bit by bit; None: nothing. Mutates this and the pool.

        On a GPU does not wait for it.
        """
        if not (plan.swap_outs or plan.swap_ins or plan.fetches or plan.saves):
            return None
        differing: list[tuple[tuple[BlockSwap, ...], Tensor]] = []
        done: list[torch.cuda.Event] = []
        if plan.swap_outs or plan.swap_ins:
            if self._beside is not None:  # a host block may have another use by now
                torch.cuda.current_stream().wait_stream(self._beside)
            self._out(plan.swap_outs)
            self._in(plan.swap_ins, differing)
            self._note_end(done)
        if plan.fetches or plan.saves:
            with self._beside_step():
                self._in(plan.fetches, differing)
                self._out(plan.saves)
                self._note_end(done)
        return MovedBlocks(tuple(differing), tuple(done))

    @contextmanager
    def _beside_step(self) -> Iterator[None]:
        if self._beside is None:
            yield
            return
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            yield

    def _note_end(self, done: list[torch.cuda.Event]) -> None:
        if self._beside is not None:
            done.append(torch.cuda.Event())
            done[-1].record()

    def _out(self, swaps: Sequence[BlockSwap]) -> None:
        for device, host in _runs(swaps):
            self.tensor[host].copy_(self._pool.tensor[device], non_blocking=True)
        if swaps:
            self._digests[self._host_ids(swaps)] = self._device_digests(swaps)

    def _in(self, swaps: tuple[BlockSwap, ...], differing: list[tuple[tuple[BlockSwap, ...], Tensor]]) -> None:
        for device, host in _runs(swaps):
            self._pool.tensor[device].copy_(self.tensor[host], non_blocking=True)
        if swaps:
            differ = self._device_digests(swaps) != self._digests[self._host_ids(swaps)]
            told = torch.empty(len(swaps), dtype=torch.bool, pin_memory=differ.is_cuda)
            told.copy_(differ, non_blocking=True)
            differing.append((swaps, told))

    def _device_digests(self, swaps: Sequence[BlockSwap]) -> Tensor:
        assert self._digester is not None, "blocks are swapped, and there is no host memory"
        words = self._pool.tensor.view(self._pool.num_blocks, -1).view(torch.int32)
        device_ids = torch.tensor([swap.device for swap in swaps], dtype=torch.int64)
        return self._digester.sum_blocks(words, to_device(device_ids, words.device))

    def _host_ids(self, swaps: Sequence[BlockSwap]) -> Tensor:
        return to_device(torch.tensor([swap.host for swap in swaps], dtype=torch.int64), self._digests.device)


def _runs(swaps: Sequence[BlockSwap]) -> Iterator[tuple[slice, slice]]:
    """Of the device and of the host: blocks that are adjacent in both go in one copy."""
    start = 0
    for index in range(1, len(swaps) + 1):
        first, count = swaps[start], index - start
        if index < len(swaps) and swaps[index] == BlockSwap(first.device + count, first.host + count):
            continue
        yield slice(first.device, first.device + count), slice(first.host, first.host + count)
        start = index
