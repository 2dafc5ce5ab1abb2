"""Blocks that several requests hold because they have a prefix in common: nobody's own, they are counted once.

Each request's promise is for the blocks that only it holds. A block that a second request finds while the first one
holds it leaves the first one's promise for this account, and stays in it until its last holder lets go. When that will
be is not foreseen: to all projections it stays for ever, so no room is promised that there may not be.

Forks of one request are one holder; so is a transfer with its request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class Left(NamedTuple):
    """num_shared: how many of the blocks that a request let go of were in the account; num_gone: are not any more."""

    num_shared: int
    num_gone: int


class SharedBlocks:
    """Engine thread only."""

    def __init__(self) -> None:
        self._num_holders: dict[int, int] = {}
        # Who alone holds a block with a name. Of blocks that are shared or have no owner it says nothing.
        self._holder: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._num_holders)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._num_holders

    def own(self, request_id: str, block_ids: Iterable[int]) -> None:
        """Blocks with names that only this request holds. Mutates."""
        self._holder.update(dict.fromkeys(block_ids, request_id))

    def would_join(self, block_ids: Iterable[int]) -> Counter[str]:
        """If one more request held these blocks, which others hold: how many would be in the account by that, by whose
        own they are."""
        return Counter([self._holder[block_id] for block_id in block_ids if block_id not in self._num_holders])

    def join(self, block_ids: Iterable[int]) -> None:
        """One more request holds these blocks, which others hold. Mutates."""
        for block_id in block_ids:
            self._num_holders[block_id] = self._num_holders.get(block_id, 1) + 1

    def leave(self, block_ids: Iterable[int]) -> Left:
        """A request lets go of blocks, each named once. Mutates."""
        num_shared = num_gone = 0
        for block_id in block_ids if self._num_holders else ():
            num_holders = self._num_holders.get(block_id)
            if num_holders is None:
                continue
            num_shared += 1
            if num_holders > 1:
                self._num_holders[block_id] = num_holders - 1
            else:
                del self._num_holders[block_id]
                num_gone += 1
        return Left(num_shared, num_gone)
