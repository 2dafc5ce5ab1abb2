"""The pieces of one prompt by name, hashed no further than somebody wants to know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler.prefix_hash import block_keys
from scheduler.recent_keys import PIECE_BLOCKS, piece_number


class PromptKeys:
    """Of prompts that most replicas do not know the first piece is all that is hashed before they are routed.

    On the router's event loop. A piece takes some 10 us.
    """

    def __init__(self, start: bytes, ids: Sequence[int], block_size: int) -> None:
        """start: of the chain (`scheduler.prefix_hash.chain_start`). Only whole pieces have a key."""
        self._parent, self._ids = start, ids
        self._block_size, self._piece_size = block_size, PIECE_BLOCKS * block_size
        self._numbers: list[int] = []
        self.num_pieces = len(ids) // self._piece_size

    def __iter__(self) -> Iterator[int]:
        """In order, each hashed when it is asked for the first time. Mutates."""
        numbers, index = self._numbers, 0
        while index < self.num_pieces:
            if index == len(numbers):
                self._hash_next()
            yield numbers[index]
            index += 1

    @property
    def num_unhashed(self) -> int:
        return self.num_pieces - len(self._numbers)

    def hash_some(self, num_pieces: int) -> None:
        """So many more, if there are. Mutates."""
        for _ in range(min(num_pieces, self.num_unhashed)):
            self._hash_next()

    def all(self) -> list[int]:
        """Every piece. Mutates; not to be changed."""
        self.hash_some(self.num_unhashed)
        return self._numbers

    def _hash_next(self) -> None:
        begin = len(self._numbers) * self._piece_size
        self._parent = block_keys(self._parent, self._ids[begin : begin + self._piece_size], self._block_size)[-1]
        self._numbers.append(piece_number(self._parent))
