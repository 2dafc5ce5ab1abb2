"""Cached blocks between the device and host memory: those that would go soon are copied out, those that are found there
come back.

    out: a block that nobody owns, when it is among those that go next; it stays where it is until it is evicted
    back: a request that was admitted waits until what was found of its prompt is here, and is computed from there on

Both are beside the steps that copy them: nothing that a step computes depends on what it copies. So an eviction waits
for no copy (what goes earlier is just not kept), and what comes back is used only when its step is committed, and with
that known to be what once went out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from scheduler.block_allocator import BlockAllocator
from scheduler.host_cache import HostCache
from scheduler.plan import BlockSwap
from scheduler.plan_builder import PlanBuilder
from scheduler.prefix_book import PrefixBook, PrefixStats
from scheduler.request import Request

# So much of the pool is free or has a copy in host memory, if need be by copying. A prompt takes all its blocks at
# once, and others' last blocks are of no use on the host if their first ones are lost by that.
_READY_PART = 4
# Blocks that one step copies at most, in both directions: beside rows, or when there is nothing else to do, so many
# that nobody waits long for it; beside prompts as many as the largest steps compute, and more.
_MOST_BESIDE_ROWS = 128
_MOST_BESIDE_PROMPTS = 1024


@dataclass(eq=False, slots=True)
class _Coming:
    """A request whose prompt waits. num_planned: blocks of it that are here or on their way; num_here: can be used.
    steps: those in flight that copy for it, and num_planned behind each. is_cut: nothing more comes."""

    request: Request
    num_planned: int
    num_here: int
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    is_cut: bool = False


class HostTier:
    """Engine thread only. num_...: ever, but for num_pending_tokens."""

    def __init__(
        self,
        host: HostCache,
        book: PrefixBook,
        allocator: BlockAllocator,
        builder: PlanBuilder,
        block_size: int,
        ready: Callable[[Request], None],
    ) -> None:
        """builder: of the lane whose steps copy. ready: takes a request whose prompt can be computed."""
        self.num_found_tokens = 0
        self.num_saved_blocks = 0
        self.num_damaged_blocks = 0
        self.num_pending_tokens = 0  # of prompts that wait, but for what was found of them on the device
        self._host, self._book, self._allocator, self._builder, self._ready = host, book, allocator, builder, ready
        self._cache, self._block_size = book.cache, block_size
        self._coming: dict[str, _Coming] = {}
        self._num_wanted = -(-allocator.num_blocks // _READY_PART)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._coming

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits, or something is on its way."""
        return bool(self._coming or self._host.num_written)

    @property
    def num_before_saves(self) -> int:
        """Blocks that can be given away before the next ones are copied out."""
        num_unsaved = self._cache.num_unsaved
        return max(0, self._allocator.num_free - num_unsaved - (self._num_wanted if num_unsaved else 0))

    def counted(self, stats: PrefixStats) -> PrefixStats:
        """The book's, with what was found in host memory, and without those who still wait for it. Any thread."""
        num_known = stats.num_looked_up_tokens - self.num_pending_tokens
        return stats._replace(num_looked_up_tokens=num_known, num_host_tokens=self.num_found_tokens)

    # -- back --------------------------------------------------------------------------------------

    def take(self, request: Request) -> bool:
        """Have a request that was admitted wait if host memory has more of its prompt. Mutates."""
        num_found = request.num_cached // self._block_size
        if not self._finds(request, num_found):
            return False
        self._coming[request.request_id] = _Coming(request, num_found, num_found)
        self.num_pending_tokens += request.prompt_len - request.num_cached
        return True

    def _finds(self, request: Request, place: int) -> bool:
        """Whether block `place` of its prompt seems to be in host memory, and of use."""
        return place < self._book.most(request) and self._host.has(self._book.key(request, place))

    def fetch(self, step_id: int, *, has_rows: bool) -> int:
        """Have the step being planned copy back what those who wait need; how many blocks. Mutates."""
        room = most = _MOST_BESIDE_ROWS if has_rows else _MOST_BESIDE_PROMPTS
        for coming in list(self._coming.values()):
            if coming.is_cut or not room:
                continue
            request, first = coming.request, coming.num_planned
            assert request.chain is not None
            num_wanted = min(room, self._book.most(request) - first)
            host_ids = self._host.find(request.chain, first, num_wanted, step_id)
            if host_ids:
                table = request.sequences[0].block_ids[first : first + len(host_ids)]
                self._builder.fetch(tuple([BlockSwap(*pair) for pair in zip(table, host_ids, strict=True)]))
                coming.num_planned += len(host_ids)
                coming.steps.append((step_id, coming.num_planned))
                request.last_step_id = step_id
                room -= len(host_ids)
            elif not coming.steps:  # who gave way has taken it
                self._begin(coming)
        return most - room

    def fetched(self, step_id: int, damaged: Collection[BlockSwap]) -> None:
        """The steps up to this one are committed. damaged: copied back by this one, and not what went out. Mutates."""
        wrong = {swap.device: swap.host for swap in damaged}
        for coming in list(self._coming.values()) if self._coming else ():
            if not coming.steps or coming.steps[0][0] > step_id:
                continue
            while coming.steps and coming.steps[0][0] <= step_id:
                self._arrived(coming, coming.steps.popleft()[1], wrong)
            if not coming.steps and (coming.is_cut or not self._finds(coming.request, coming.num_planned)):
                self._begin(coming)

    def _arrived(self, coming: _Coming, end: int, wrong: dict[int, int]) -> None:
        """Blocks up to `end` of its prompt are in the pool."""
        request = coming.request
        table = request.sequences[0].block_ids
        places = [place for place in range(coming.num_here, end) if table[place] in wrong] if wrong else []
        for place in places:
            self.num_damaged_blocks += self._host.drop(self._book.key(request, place), wrong[table[place]])
        if not coming.is_cut:
            coming.num_here = min([end, *places])
            self._book.came_back(request, coming.num_here)
        coming.is_cut = coming.is_cut or bool(places)

    def _begin(self, coming: _Coming) -> None:
        """Its prompt is computed from what is here on."""
        request = coming.request
        num_tokens = coming.num_here * self._block_size
        self.num_found_tokens += num_tokens - request.num_cached
        self._forget(request)
        request.num_cached = request.num_prefilled = num_tokens
        self._ready(request)

    def discard(self, request: Request) -> None:
        """It is over. Ignored unless it waits. Mutates."""
        if request.request_id in self._coming:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._coming[request.request_id]
        self.num_pending_tokens -= request.prompt_len - request.num_cached

    def abandoned(self) -> None:
        """No step in flight will be committed: nothing comes any more. Mutates."""
        for coming in list(self._coming.values()):
            self._begin(coming)

    # -- out ---------------------------------------------------------------------------------------

    def save(self, step_id: int, num_fetched: int, *, is_large: bool) -> None:
        """Have the step being planned copy out blocks that would go soon. Mutates.

        num_fetched: blocks that it copies back. is_large: whether it computes prompts, and no rows.
        """
        room = (_MOST_BESIDE_PROMPTS if is_large else _MOST_BESIDE_ROWS) - num_fetched
        missing = self._num_wanted - (self._allocator.num_free - self._cache.num_unsaved)
        swaps: list[BlockSwap] = []
        while missing > 0 and len(swaps) < room and self._cache.num_unsaved and self._host.has_room(step_id):
            block_id, name = self._cache.next_unsaved()
            missing -= 1
            if self._host.has(name.key):
                self._host.use(name.key)
            else:
                swaps.append(BlockSwap(block_id, self._host.begin_save(step_id, block_id, name)))
        if swaps:
            self._builder.save(tuple(swaps))

    def saved(self, step_id: int) -> None:
        """The steps up to this one are committed. Mutates."""
        if self._host.num_written:
            self.num_saved_blocks += self._host.saved(step_id, self._cache.is_named)
