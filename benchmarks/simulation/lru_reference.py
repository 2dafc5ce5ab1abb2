"""What a prefix cache finds, by the simplest model there is: the blocks that were used last, prompt after prompt."""

from __future__ import annotations

from collections.abc import Sequence


class LruReference:
    """Independent of everything that is shipped: no hashes, no tokens, no requests at the same time. A block has a name
    that stands for all that is before it too."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._used: dict[int, None] = {}  # least recently used first

    def take(self, names: Sequence[int]) -> int:
        """How many of a prompt's first blocks are here; all of them are afterwards. Mutates.

        Of one prompt the last block goes first: what it builds on is worth more.
        """
        found = 0
        while found < len(names) and names[found] in self._used:
            found += 1
        for name in reversed(names):
            self._used.pop(name, None)
            self._used[name] = None
        while len(self._used) > self._num_blocks:
            del self._used[next(iter(self._used))]
        return found
