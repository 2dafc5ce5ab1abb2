"""Requests that gave way: their blocks lie in host memory until there is room for them again.

    RUNNING --swap_out--> PREEMPTED: the step copies blocks out; when it is committed, the blocks are free
    PREEMPTED --swap_in--> RUNNING: the step copies them back into other blocks before it computes

Device blocks are not reused before the step that reads them out is committed: a transfer does not wait for steps,
and a step that failed is run again. Host blocks that are copied back are kept as long, for the same reason. A
preempted request keeps its slots, and with them its last tokens, so steps in flight can still end it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.admission import distinct_blocks
from scheduler.block_allocator import BlockAllocator
from scheduler.host_cache import HostCache
from scheduler.plan import BlockSwap
from scheduler.plan_builder import PlanBuilder
from scheduler.request import Request


@dataclass(slots=True)
class _Away:
    """A preempted request. tables: of each sequence, indices into host_ids: what was shared stays shared."""

    request: Request
    host_ids: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    is_out: bool = False  # the step that copies it out is committed


@dataclass(frozen=True, slots=True)
class _Cooling:
    """Blocks that a step copies from: with its commit they are free."""

    step_id: int
    request_id: str
    num_blocks: int  # of the device, each once, that come free
    device_refs: tuple[int, ...]  # once for each sequence that had it
    host_ids: tuple[int, ...]


class Preemption:
    """Who is in host memory, and which of its blocks are whose. Engine thread only."""

    def __init__(self, allocator: BlockAllocator, builder: PlanBuilder, block_size: int, host: HostCache) -> None:
        self.host = host
        self.num_swapped = 0  # preemptions to host memory, ever
        self.num_evicted = 0  # preemptions for which there was no host memory, ever
        self._allocator = allocator
        self._builder = builder
        self._block_size = block_size
        self._away: dict[str, _Away] = {}
        self._cooling: list[_Cooling] = []
        self._protected: dict[str, Request] = {}  # came back lately; some need no protection any more

    def __len__(self) -> int:
        """Requests that are preempted now."""
        return len(self._away)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._away

    @property
    def num_host_blocks(self) -> int:
        return self.host.num_blocks

    @property
    def num_host_blocks_used(self) -> int:
        return self.host.num_used

    @property
    def num_blocks_away(self) -> int:
        """Blocks that the preempted ones need to come back."""
        return sum(len(away.host_ids) for away in self._away.values()) if self._away else 0

    @property
    def is_cooling(self) -> bool:
        """Whether a step in flight copies from blocks, of the device or the host."""
        return bool(self._cooling)

    @property
    def num_cooling(self) -> int:
        """Device blocks that come free with commits to come."""
        return sum(cooling.num_blocks for cooling in self._cooling)

    # -- out and back ------------------------------------------------------------------------------

    def swap_out(self, request: Request, step_id: int) -> bool:
        """Move a request's blocks to host memory in the step being planned; False when they do not fit. Mutates."""
        blocks = distinct_blocks(sequence.block_ids for sequence in request.sequences)
        host_ids = self.host.take(len(blocks))
        if host_ids is None:
            return False
        self._builder.swap_out(tuple(BlockSwap(*pair) for pair in zip(blocks, host_ids, strict=True)))
        index_of = {block_id: index for index, block_id in enumerate(blocks)}
        tables = tuple(tuple(index_of[block_id] for block_id in s.block_ids) for s in request.sequences)
        refs = tuple(block_id for sequence in request.sequences for block_id in sequence.block_ids)
        self._cooling.append(_Cooling(step_id, request.request_id, len(blocks) - request.num_shared, refs, ()))
        self._away[request.request_id] = _Away(request, host_ids, tables)
        for sequence in request.sequences:
            sequence.block_ids = []
        request.last_step_id = step_id
        self.num_swapped += 1
        return True

    def num_blocks_of(self, request_id: str) -> int:
        """Blocks that it needs to come back."""
        return len(self._away[request_id].host_ids)

    def tables_of(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """Tables of its sequences: the same number for the same block."""
        return self._away[request_id].tables

    def swap_in(self, request: Request, step_id: int) -> None:
        """Bring a request's blocks back in the step being planned, into free ones. Mutates. Raises OutOfBlocks."""
        away = self._away[request.request_id]
        blocks = self._allocator.allocate(len(away.host_ids))
        del self._away[request.request_id]
        self._builder.swap_in(tuple(BlockSwap(*pair) for pair in zip(blocks, away.host_ids, strict=True)))
        self._cooling.append(_Cooling(step_id, request.request_id, 0, (), away.host_ids))
        seen: set[int] = set()
        for sequence, table in zip(request.sequences, away.tables, strict=True):
            sequence.block_ids = [blocks[index] for index in table]
            self._allocator.share(block_id for block_id in sequence.block_ids if block_id in seen)
            seen.update(sequence.block_ids)
            self._builder.write_table(sequence.slot, 0, tuple(sequence.block_ids))
        request.last_step_id = step_id
        request.protected_until = num_planned(request) + self._block_size
        self._protected[request.request_id] = request

    def step_committed(self, step_id: int) -> list[tuple[str, list[int]]]:
        """What the step copied from is free; the requests whose device blocks these were, with the blocks. Mutates."""
        due = [cooling for cooling in self._cooling if cooling.step_id <= step_id]
        if not due:
            return []
        self._cooling = [cooling for cooling in self._cooling if cooling.step_id > step_id]
        for cooling in due:
            self._allocator.release(cooling.device_refs)
            self.host.give(cooling.host_ids)
            if cooling.device_refs and cooling.request_id in self._away:
                self._away[cooling.request_id].is_out = True
        out = [cooling for cooling in due if cooling.device_refs]
        return [(cooling.request_id, list(dict.fromkeys(cooling.device_refs))) for cooling in out]

    def discard(self, request_id: str) -> None:
        """The request is over, and no step works on it. Mutates."""
        self._protected.pop(request_id, None)
        away = self._away.pop(request_id, None)
        if away is not None:
            self.host.give(away.host_ids)

    # -- whose turn it is --------------------------------------------------------------------------

    def next_to_resume(self) -> Request | None:
        """The most important preempted request, if it can be brought back: nobody overtakes it."""
        if not self._away:
            return None
        first = min(self._away.values(), key=lambda away: importance(away.request))
        return first.request if first.is_out else None

    def is_protected(self, request: Request) -> bool:
        """Whether it came back and has not got far enough since to be preempted again."""
        return num_planned(request) < min(request.protected_until, request.spec.max_tokens)

    def num_protected_blocks(self) -> int:
        """Blocks that must stay free so that the protected ones reach the end of their protection."""
        if not self._protected:
            return 0
        self._protected = {rid: request for rid, request in self._protected.items() if self.is_protected(request)}
        return sum(
            growth_blocks(request, request.protected_until - num_planned(request), self._block_size)
            for request in self._protected.values()
            if request.request_id not in self._away
        )


def importance(request: Request) -> tuple[int, int]:
    """Sorts the most important request first: higher priority, then earlier admission. The last one gives way."""
    return -request.spec.priority, request.admission_number


def num_planned(request: Request) -> int:
    """Tokens planned that will surely count of the choices that go on, of the one that is least far; max_tokens when
    none does."""
    live = (s.num_planned - s.num_unsure for s in request.sequences if s.finish_reason is None)
    return min(live, default=request.spec.max_tokens)


def growth_blocks(
    request: Request, num_rows: int, block_size: int, tables: Iterable[Sequence[int]] | None = None
) -> int:
    """Blocks that its next num_rows rows (or as many as it has left) take, copies of shared ones included.

    Of a beam search: at most so many, and for one row exactly. tables: its sequences' while it is preempted.
    """
    most, prompt_len = request.spec.max_tokens, request.prompt_len
    live = [s for s in request.sequences if s.finish_reason is None and s.num_planned < most]
    if not live or num_rows <= 0:
        return 0
    grown = 0
    for sequence in live:
        position = prompt_len + sequence.num_planned - 1
        last = position + min(num_rows, most - sequence.num_planned) - 1
        grown += last // block_size - (position - 1) // block_size
    if not position % block_size:
        return grown
    if request.search is not None:  # whichever beams live on, each writes its own copy of the last block
        tables = [sequence.block_ids for sequence in request.sequences] if tables is None else tables
        place = position // block_size
        grown += len(live) - len({table[place] for table in tables if len(table) > place})
    elif live[0].num_planned == 1:
        grown += min(len(live), len(request.sequences) - 1)
    return grown
