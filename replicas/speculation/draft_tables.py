"""Which blocks of a draft model's own pool hold whose KV. Standard library only.

Nobody says when a sequence is over: its slot is taken by another one then, or its blocks by whoever is short of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from scheduler.plan import TableWrite

# A sequence that was not drafted for in so many turns is over, or sits out: its blocks may be taken. One that comes
# back is computed again. Longer than a row pauses whose drafts are never accepted.
IDLE_TURNS = 80


class DraftTables:
    """Blocks by slot, each of one slot alone."""

    def __init__(self, num_slots: int, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._free = list(range(num_blocks))[::-1]
        self._tables: list[list[int]] = [[] for _ in range(num_slots)]
        self._last_turn = [0] * num_slots
        self._turn = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def table(self, slot: int) -> tuple[int, ...]:
        return tuple(self._tables[slot])

    def next_turn(self, slots: Collection[int]) -> None:
        """These are drafted for now. Mutates."""
        self._turn += 1
        for slot in slots:
            self._last_turn[slot] = self._turn

    def keep(self, slot: int) -> None:
        """It is not idle: drafts for it are to come. Mutates."""
        self._last_turn[slot] = self._turn

    def reserve(self, slot: int, num_tokens: int) -> tuple[TableWrite | None, tuple[int, ...]] | None:
        """Blocks for so many tokens: what is new in its table, if anything is, and slots that have lost theirs to it.

        None if there are not enough: then nothing has changed. Mutates.
        """
        table = self._tables[slot]
        needed = -(-num_tokens // self._block_size) - len(table)
        if needed <= 0:
            return None, ()
        idle: list[int] = []
        num_there = len(self._free)
        for other in self._idle_slots():
            if num_there >= needed:
                break
            idle.append(other)
            num_there += len(self._tables[other])
        if num_there < needed:
            return None
        for other in idle:
            self.release(other)
        start = len(table)
        table += [self._free.pop() for _ in range(needed)]
        return TableWrite(slot, start, tuple(table[start:])), tuple(idle)

    def release(self, slot: int) -> None:
        """Its blocks are free. Mutates."""
        self._free += self._tables[slot][::-1]
        self._tables[slot] = []

    def _idle_slots(self) -> Iterator[int]:
        """With blocks, those that were drafted for longest ago first."""
        latest = self._turn - IDLE_TURNS
        idle = [slot for slot, turn in enumerate(self._last_turn) if turn <= latest and self._tables[slot]]
        yield from sorted(idle, key=lambda slot: self._last_turn[slot])
