"""How many blocks may be promised, and to whom: what all budgets have in common, and the simplest one.

A promise is made at admission and ends when the last block of the request is free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold the KV of `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def blocks_for_generation(prompt_len: int, max_tokens: int, num_choices: int, block_size: int) -> int:
    """Worst case of one request: full prompt blocks once, the rest once per choice (copy-on-write).

    The last sampled token is never fed, so it needs no KV: prompt_len + max_tokens - 1 positions a choice,
    and with max_tokens 1 no choice writes at all.
    """
    if max_tokens == 1:
        return num_blocks_for(prompt_len, block_size)
    shared = prompt_len // block_size
    per_choice = num_blocks_for(prompt_len + max_tokens - 1, block_size)
    return shared + num_choices * (per_choice - shared)


class Budget(ABC):
    """Promises of blocks by request id. Not thread-safe: the engine thread owns it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    @property
    @abstractmethod
    def promised(self) -> int:
        """Blocks that are in use or must be kept for those who were admitted."""

    @property
    @abstractmethod
    def available(self) -> int:
        """Blocks that a newcomer gets, whatever it does with them."""

    def fits_ever(self, num_blocks: int) -> bool:
        """Whether a request that needs so many could be admitted if it were alone."""
        return num_blocks <= self.num_blocks

    @abstractmethod
    def shrink(self, request_id: str, num_blocks: int) -> None:
        """The request is over, but so many of its blocks are still held. Mutates; a promise never grows."""

    @abstractmethod
    def end(self, request_id: str) -> None:
        """The request's blocks are all free again. Mutates."""


class MemoryBudget(Budget):
    """Promises once and for all what a request can ever need, so an admitted request never waits for memory."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._promised: dict[str, int] = {}
        self._total_promised = 0

    @property
    def available(self) -> int:
        return self.num_blocks - self._total_promised

    @property
    def promised(self) -> int:
        return self._total_promised

    def promise(self, request_id: str, num_blocks: int) -> bool:
        """Promise blocks to a request if they are available; mutates only then. One promise per request."""
        assert request_id not in self._promised, f"{request_id} already has a promise"
        if num_blocks > self.available:
            return False
        self._promised[request_id] = num_blocks
        self._total_promised += num_blocks
        return True

    def shrink(self, request_id: str, num_blocks: int) -> None:
        assert num_blocks <= self._promised[request_id], f"{request_id} holds more than its promise"
        self._total_promised -= self._promised[request_id] - num_blocks
        self._promised[request_id] = num_blocks

    def end(self, request_id: str) -> None:
        self._total_promised -= self._promised.pop(request_id)
