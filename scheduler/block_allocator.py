"""Who owns which KV block.

A block belongs to requests (counted: forked sequences share) and possibly to transfers in flight
(counted too: it has two owners then). It is free only when both let go:

    free --allocate--> request=1 --share--> request=2 ...
                          |  hold
                          v
             request=1, transfer=1 --release--> request=0, transfer=1 --unhold--> free

A block that a one-sided read may still write, because its handle never ended, keeps that owner until the
engine restarts.

With a prefix cache there is a third state, of blocks whose content has a name there and that nobody owns:

    --release or unhold--> cached --use--> request=1
                             `--evict, when nothing else is free--> free
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.block_chain import PromptChain
from scheduler.free_runs import FreeRuns
from scheduler.prefix_cache import BlockName, PrefixCache

# For adjacent blocks this part of the pool, at most, is evicted besides what is wanted. In a pool full of cached
# prompts of some 700 blocks a new one then lies in 4 pieces instead of 6; a 16th of the pool would make it 2.
_SPARE_PART = 64


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for. Nothing was taken."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(wanted, free)
        self.wanted = wanted
        self.free = free

    def __str__(self) -> str:
        return f"{self.wanted} KV blocks wanted, {self.free} free"


class BlockAccountingError(AssertionError):
    """A block was released or held by someone who does not own it: a bug of ours, never of a client."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """The ledger of a pool: free + request + transfer_only + cached == total."""

    total: int
    free: int
    request: int  # owned by at least one request
    transfer_only: int  # let go by its requests, still held by a transfer (leased or being read)
    cached: int = 0  # owned by nobody, kept for whoever has the same prefix; as good as free for all others

    @property
    def unowned(self) -> int:
        """Blocks that can be allocated."""
        return self.free + self.cached


class BlockAllocator:
    """Blocks 0 .. num_blocks - 1. Not thread-safe: the engine thread owns it. What raises has changed nothing."""

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = FreeRuns(num_blocks)
        self._cache = cache
        # Plain dicts: a Counter deletes and looks up several times as slowly, and requests have hundreds of blocks.
        self._request_refs: dict[int, int] = {}
        self._transfer_refs: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free ones and cached ones."""
        return len(self._free) if self._cache is None else len(self._free) + self._cache.num_idle

    def allocate(self, count: int, after: int | None = None) -> tuple[int, ...]:
        """Give `count` blocks to a request, adjacent ones where possible; mutates.

        after: the block that the new ones will follow in their sequence. Raises OutOfBlocks.
        """
        if count > self.num_free:
            raise OutOfBlocks(count, self.num_free)
        if self._cache is not None:
            self._evict_for(count, self._cache)
        block_ids = self._free.take(count, after)
        self._request_refs.update(dict.fromkeys(block_ids, 1))
        return tuple(block_ids)

    def _evict_for(self, count: int, cache: PrefixCache) -> None:
        """Until so many are free, and if possible in one run."""
        free, num_spare = self._free, self.num_blocks // _SPARE_PART
        while cache.num_idle and (missing := count + num_spare - len(free)) > 0 and free.longest < count:
            self._free.give(cache.evict(missing - num_spare if missing > num_spare else min(missing, count)))

    def use(self, block_ids: Iterable[int], chain: PromptChain) -> None:
        """One more sequence uses these blocks, which the cache has found: the first ones of its chain. Mutates."""
        assert self._cache is not None
        refs = self._request_refs
        block_ids = tuple(block_ids)
        if not self._cache.have_names(block_ids):
            raise BlockAccountingError(f"cannot use blocks {block_ids[:10]}: one of them has no name")
        for block_id in block_ids:
            refs[block_id] = refs.get(block_id, 0) + 1
        self._cache.use(block_ids, chain)

    def forget_contents(self, block_ids: Iterable[int] | None = None, elsewhere: Iterable[BlockName] = ()) -> None:
        """Nothing of these blocks, nor of what builds on them, is found any more (None: of all): they are free, as far
        as they were cached. elsewhere: as `PrefixCache.forget`. Mutates."""
        if self._cache is not None:
            self._free.give(self._cache.clear() if block_ids is None else self._cache.forget(block_ids, elsewhere))

    def share(self, block_ids: Iterable[int]) -> None:
        """One more sequence uses these blocks (fork). Mutates."""
        self._join(self._request_refs, block_ids, "share")

    def is_shared(self, block_id: int) -> bool:
        """Whether a write to the block would be seen by someone else, so that it must be copied first."""
        return self._request_refs.get(block_id, 0) > 1 or block_id in self._transfer_refs

    def release(self, block_ids: Iterable[int]) -> None:
        """A sequence lets go of blocks, in their order. Mutates; frees, or caches, those with no other owner."""
        self._let_go(self._request_refs, block_ids, "release")

    def hold(self, block_ids: Iterable[int]) -> None:
        """A transfer takes its share of blocks that a request owns. Mutates."""
        self._join(self._transfer_refs, block_ids, "hold")

    def unhold(self, block_ids: Iterable[int]) -> None:
        """A transfer lets go. As `release`."""
        self._let_go(self._transfer_refs, block_ids, "unhold")

    def counts(self) -> BlockCounts:
        return BlockCounts(
            total=self.num_blocks,
            free=len(self._free),
            request=len(self._request_refs),
            transfer_only=len(self._transfer_refs.keys() - self._request_refs.keys()),
            cached=0 if self._cache is None else self._cache.num_idle,
        )

    def check_integrity(self) -> None:
        """Raise BlockAccountingError unless every block is in exactly one of free, owned and cached. O(num_blocks)."""
        self._free.check_integrity()
        free = set(self._free)
        owned = set(self._request_refs) | set(self._transfer_refs)
        if self._cache is not None:
            self._cache.check_integrity()
            cached = set(self._cache.idle())
            if cached & (free | owned):
                raise BlockAccountingError(f"blocks both cached and not: {sorted(cached & (free | owned))[:10]}")
            if any(self._cache.has_name(block_id) for block_id in free):
                raise BlockAccountingError("a free block has a name")
            owned |= cached
        if not free | owned <= set(range(self.num_blocks)):
            raise BlockAccountingError(f"blocks outside 0..{self.num_blocks - 1}")
        if free & owned:
            raise BlockAccountingError(f"blocks both free and owned: {sorted(free & owned)[:10]}")
        if len(free) + len(owned) != self.num_blocks:
            raise BlockAccountingError(f"{len(free)} free + {len(owned)} others of {self.num_blocks}")
        if any(count < 1 for refs in (self._request_refs, self._transfer_refs) for count in refs.values()):
            raise BlockAccountingError("a reference count below one was kept")

    def _join(self, refs: dict[int, int], block_ids: Iterable[int], verb: str) -> None:
        """One more owner of blocks that a request owns."""
        times = Counter(block_ids)
        for block_id in times:
            if block_id not in self._request_refs:
                raise BlockAccountingError(f"cannot {verb} block {block_id}: no request owns it")
        for block_id, count in times.items():
            refs[block_id] = refs.get(block_id, 0) + count

    def _let_go(self, refs: dict[int, int], block_ids: Iterable[int], verb: str) -> None:
        times = Counter(block_ids)
        for block_id, count in times.items():
            if refs.get(block_id, 0) < count:
                raise BlockAccountingError(
                    f"cannot {verb} block {block_id} {count} times: owned {refs.get(block_id, 0)} times"
                )
        others = self._transfer_refs if refs is self._request_refs else self._request_refs
        freed = []
        for block_id, count in times.items():
            left = refs[block_id] - count
            if left:
                refs[block_id] = left
            else:
                del refs[block_id]
                if block_id not in others:
                    freed.append(block_id)
        self._free.give(freed if self._cache is None else self._cache.keep(freed))
