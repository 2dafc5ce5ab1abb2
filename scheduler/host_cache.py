"""Blocks of host memory: whose they are, and which of them hold cached KV that can be found by its content.

    free --take--> of a request that gave way --give--> free
    free --begin_save--> being written --commit of that step--> cached --the least recently used--> whoever wants it

Who gave way comes first: it takes cached blocks like free ones, also those that a step in flight reads or writes. That
is sound because all copies between the device and the host are made by steps of one lane, in their order.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice

from scheduler.block_chain import PromptChain
from scheduler.prefix_cache import BlockName


@dataclass(slots=True)
class _Cached:
    """read_by: the last step that copies it back."""

    host_id: int
    name: BlockName
    read_by: int = -1


@dataclass(frozen=True, slots=True)
class _Written:
    """By this step, from this block of the device, which had this name when the step was planned."""

    step_id: int
    block_id: int
    name: BlockName


class HostCache:
    """Host blocks 0 .. num_blocks - 1. Engine thread only."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._cached: OrderedDict[bytes, _Cached] = OrderedDict()  # the least recently used first
        self._written: OrderedDict[int, _Written] = OrderedDict()  # by host block

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_written(self) -> int:
        """Blocks that steps in flight copy here to be cached."""
        return len(self._written)

    @property
    def num_used(self) -> int:
        """Blocks of requests that gave way."""
        return self.num_blocks - len(self._free) - len(self._cached) - len(self._written)

    # -- requests that gave way --------------------------------------------------------------------

    def take(self, count: int) -> tuple[int, ...] | None:
        """Blocks for a request, whatever is cached in them; None: there are not so many. Mutates only then."""
        if count > self.num_blocks - self.num_used:
            return None
        while len(self._free) < count:
            if self._cached:
                self.give((self._cached.popitem(last=False)[1].host_id,))
            else:
                self.give((self._written.popitem(last=False)[0],))
        return tuple([heapq.heappop(self._free) for _ in range(count)])

    def give(self, host_ids: Iterable[int]) -> None:
        """These blocks are free again. Mutates."""
        for host_id in host_ids:
            heapq.heappush(self._free, host_id)

    # -- cached: out -------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        return key in self._cached

    def use(self, key: bytes) -> None:
        """It is the last one to go. Mutates."""
        self._cached.move_to_end(key)

    def has_room(self, step_id: int) -> bool:
        """Whether the step being planned can copy one more block here: not over one that it copies back, as it is run
        again if it fails."""
        return bool(self._free or (self._cached and next(iter(self._cached.values())).read_by < step_id))

    def begin_save(self, step_id: int, block_id: int, name: BlockName) -> int:
        """Where the step being planned copies this block of the device; `has_room`. Mutates."""
        if not self._free:
            self.give((self._cached.popitem(last=False)[1].host_id,))
        host_id = heapq.heappop(self._free)
        self._written[host_id] = _Written(step_id, block_id, name)
        return host_id

    def saved(self, step_id: int, is_named: Callable[[int, BlockName], bool]) -> int:
        """The steps up to this one are committed: what they copied here can be found. How many blocks. Mutates.

        is_named: whether that block of the device has had the name ever since. If not, something else may have been
        written into it before it was copied.
        """
        num_saved = 0
        while self._written:
            host_id, written = next(iter(self._written.items()))
            if written.step_id > step_id:
                break
            del self._written[host_id]
            if written.name.key in self._cached or not is_named(written.block_id, written.name):
                self.give((host_id,))
            else:
                self._cached[written.name.key] = _Cached(host_id, written.name)
                num_saved += 1
        return num_saved

    # -- cached: found -----------------------------------------------------------------------------

    def find(self, chain: PromptChain, first: int, most: int, step_id: int) -> list[int]:
        """Blocks that hold blocks `first`, `first` + 1, ... of this chain, as many as are here, at most `most`, which
        the step being planned copies back. Ids are compared. Mutates."""
        cached: list[_Cached] = []
        block_bytes, parent = chain.block_bytes, chain.parent(first)
        for place, key in enumerate(islice(chain.keys, first, first + max(0, most)), start=first):
            block, begin = self._cached.get(key), place * block_bytes
            if block is None or block.name != (key, parent, chain.ids[begin : begin + block_bytes], place):
                break
            cached.append(block)
            parent = key
        for block in reversed(cached):  # what a block builds on goes behind it
            block.read_by = step_id
            self._cached.move_to_end(block.name.key)
        return [block.host_id for block in cached]

    # -- cached: gone ------------------------------------------------------------------------------

    def names(self) -> list[BlockName]:
        """Of all cached blocks. O(cached)."""
        return [block.name for block in self._cached.values()]

    def drop(self, key: bytes, host_id: int) -> bool:
        """This block does not hold what it says. False: it says so no more. Mutates."""
        block = self._cached.get(key)
        if block is None or block.host_id != host_id:
            return False
        del self._cached[key]
        self.give((host_id,))
        return True

    def forget(self, keys: Collection[bytes] | None = None) -> None:
        """Nothing with these keys is found any more; None: nothing at all. Mutates."""
        doomed = [key for key in self._cached if keys is None or key in keys]
        self.give([self._cached.pop(key).host_id for key in doomed])

    def check_integrity(self, used: Iterable[int]) -> None:
        """Raise AssertionError unless each block is in exactly one place. used: by requests that gave way."""
        cached = [block.host_id for block in self._cached.values()]
        if sorted([*used, *self._free, *cached, *self._written]) != list(range(self.num_blocks)):
            raise AssertionError("a host block is in two places, or in none")
        if any(block.name.key != key for key, block in self._cached.items()):
            raise AssertionError("host blocks by key disagree with their names")
