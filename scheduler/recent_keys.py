"""What an engine's prefix cache took in or used last, for routers that ask: a log in order. One thread writes it."""

from __future__ import annotations

from typing import NamedTuple

from scheduler.prefix_cache import PIECE_BLOCKS as PIECE_BLOCKS

# A prompt is told of by pieces of PIECE_BLOCKS blocks: the key of a piece is the key of its last block, which names all
# that is before it too, cut to so many bytes. Two pieces that seem to be the same cost a wrong guess, no wrong token.
PIECE_KEY_BYTES = 8
# 16 million tokens of blocks of 16, in half a megabyte.
MAX_RECENT_KEYS = 65_536


def piece_number(block_key: bytes) -> int:
    """The key of a piece as a number, of the key of its last block (`scheduler.prefix_hash`) or its first bytes."""
    return int.from_bytes(block_key[:PIECE_KEY_BYTES], "little")


class KeyRun(NamedTuple):
    """Keys of pieces one after another, PIECE_KEY_BYTES each, the first of them at position start. end: behind the
    newest that there is; more are to be asked for unless the run reaches it."""

    start: int
    keys: bytes
    end: int


class RecentKeys:
    """A ring of the newest keys. Positions count from 0 on and are never used twice.

    The owner's thread appends; any thread reads, and never makes it wait: a reader finds out afterwards what was
    overwritten while it copied.
    """

    def __init__(self, epoch: str, size: int = MAX_RECENT_KEYS) -> None:
        """epoch: of the engine: positions are of this log only. size: how many are kept, above 1."""
        self.epoch = epoch
        self._size = size
        self._ring = bytearray(size * PIECE_KEY_BYTES)
        self._end = 0

    def append(self, block_key: bytes) -> None:
        """The piece that ends with this block has been entered, or was found by a request. The owner's thread only.

        To be told of both has its readers forget in the order in which the cache itself does.
        """
        at = self._end % self._size * PIECE_KEY_BYTES
        self._ring[at : at + PIECE_KEY_BYTES] = block_key[:PIECE_KEY_BYTES]
        self._end += 1  # the last thing: up to here all is written

    def since(self, epoch: str, position: int, limit: int) -> KeyRun:
        """At most limit keys from the position on, or from the oldest that are kept, where the position is not among
        them or of another epoch. Any thread."""
        end = self._end
        if epoch != self.epoch or position > end:
            position = 0
        start = max(position, self._oldest(end))
        stop = min(start + limit, end)
        keys = self._copied(start, stop)
        lost = min(max(0, self._oldest(self._end) - start), stop - start)
        return KeyRun(start + lost, keys[lost * PIECE_KEY_BYTES :], end)

    def _oldest(self, end: int) -> int:
        """The slot behind the newest may be half written: what was there counts as gone."""
        return max(0, end - self._size + 1)

    def _copied(self, start: int, stop: int) -> bytes:
        first, last = start % self._size, stop % self._size
        if start == stop:
            return b""
        if first < last:
            return bytes(self._ring[first * PIECE_KEY_BYTES : last * PIECE_KEY_BYTES])
        return bytes(self._ring[first * PIECE_KEY_BYTES :] + self._ring[: last * PIECE_KEY_BYTES])
