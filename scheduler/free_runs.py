"""The free blocks of a pool, kept as maximal runs of adjacent ids.

Adjacent blocks move between workers in one piece (one descriptor instead of many), so
an allocation takes the shortest run that holds it whole, and only in need several runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import pairwise


class FreeRuns:
    """A set of block ids. All operations O(log runs) but for the shift of one sorted list."""

    def __init__(self, num_blocks: int) -> None:
        self._length_at: dict[int, int] = {}  # start of a run -> its length
        self._start_before: dict[int, int] = {}  # end (exclusive) of a run -> its start
        self._by_length: list[tuple[int, int]] = []  # (length, start), sorted
        self._num_free = 0
        if num_blocks:
            self._add(0, num_blocks)

    def __len__(self) -> int:
        return self._num_free

    def __iter__(self) -> Iterator[int]:
        for start, length in sorted(self._length_at.items()):
            yield from range(start, start + length)

    @property
    def num_runs(self) -> int:
        return len(self._length_at)

    @property
    def longest(self) -> int:
        """Blocks of the longest run."""
        return self._by_length[-1][0] if self._by_length else 0

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Remove `count` ids and return them, ascending within each run.

        after: a block id whose right neighbours are preferred (a sequence grows in place).
        Raises ValueError when fewer are free; nothing is taken then.
        """
        if count > self._num_free:
            raise ValueError(f"{count} blocks asked for, {self._num_free} free")
        taken: list[int] = []
        if after is not None and count and after + 1 in self._length_at:
            taken += self._cut(after + 1, min(count, self._length_at[after + 1]))
        while len(taken) < count:
            taken += self._cut_best(count - len(taken))
        return taken

    def give(self, block_ids: Iterable[int]) -> None:
        """Put ids back, merging them with their neighbours. An id must not be free already."""
        start = end = -1  # of the run being collected: most of a request's blocks are adjacent
        for block_id in sorted(block_ids):
            if block_id != end:
                if start != end:
                    self._give_run(start, end - start)
                start = block_id
            end = block_id + 1
        if start != end:
            self._give_run(start, end - start)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all views agree and no two runs touch. O(runs log runs)."""
        runs = sorted(self._length_at.items())
        if any(length < 1 for _, length in runs):
            raise AssertionError(f"an empty run: {runs}")
        if any(start + length >= after for (start, length), (after, _) in pairwise(runs)):
            raise AssertionError(f"runs touch or overlap: {runs}")
        if self._start_before != {start + length: start for start, length in runs}:
            raise AssertionError("the ends of the runs disagree with their starts")
        if self._by_length != sorted((length, start) for start, length in runs):
            raise AssertionError("the runs by length disagree with the runs")
        if self._num_free != sum(length for _, length in runs):
            raise AssertionError(f"{self._num_free} counted, {sum(length for _, length in runs)} in runs")

    def _cut_best(self, count: int) -> list[int]:
        """The shortest run of at least `count`, else the longest there is."""
        index = bisect_left(self._by_length, (count, -1))
        length, start = self._by_length[index] if index < len(self._by_length) else self._by_length[-1]
        return self._cut(start, min(count, length))

    def _cut(self, start: int, count: int) -> list[int]:
        length = self._length_at[start]
        self._remove(start, length)
        if count < length:
            self._add(start + count, length - count)
        return list(range(start, start + count))

    def _give_run(self, start: int, length: int) -> None:
        left = self._start_before.get(start)
        if left is not None:
            self._remove(left, start - left)
            start, length = left, start - left + length
        right = self._length_at.get(start + length)
        if right is not None:
            self._remove(start + length, right)
            length += right
        self._add(start, length)

    def _add(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        insort(self._by_length, (length, start))
        self._num_free += length

    def _remove(self, start: int, length: int) -> None:
        del self._length_at[start]
        del self._start_before[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        self._num_free -= length
