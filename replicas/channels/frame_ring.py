"""One router's encoded frames: those that wait to be sent, and the last of those that were, for replays."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple


class _Kept(NamedTuple):
    payload: bytes
    is_owed: bool


class FrameRing:
    """Bounded by what was sent: a frame leaves only once it has been, when more than max_frames or max_bytes are kept.

    As bytes: scores take a tenth of what they take as objects, and a frame that waits is encoded once. Not thread-safe.
    """

    def __init__(self, first_seq: int, max_frames: int, max_bytes: int) -> None:
        self._kept: deque[_Kept] = deque()
        self._max_frames, self._max_bytes = max_frames, max_bytes
        self._num_bytes = 0
        self._num_unsent = 0
        self._num_owed = 0  # of those that are unsent
        self.num_unsent_bytes = 0
        self.next_seq = first_seq

    @property
    def oldest_seq(self) -> int:
        return self.next_seq - len(self._kept)

    @property
    def has_unsent(self) -> bool:
        return self._num_unsent > 0

    @property
    def owes_items(self) -> bool:
        """Whether a frame that somebody waits for is unsent."""
        return self._num_owed > 0

    @property
    def first_unsent(self) -> bytes | None:
        """What is to be sent next."""
        return self._kept[-self._num_unsent].payload if self._num_unsent else None

    def keep(self, payload: bytes, is_owed: bool) -> None:
        """The frame of next_seq, unsent. is_owed: somebody waits for what is in it. Mutates."""
        self._kept.append(_Kept(payload, is_owed))
        self.next_seq += 1
        self._num_bytes += len(payload)
        self._num_unsent += 1
        self._num_owed += is_owed
        self.num_unsent_bytes += len(payload)
        self._drop()

    def sent(self) -> None:
        """first_unsent has been. Mutates."""
        frame = self._kept[-self._num_unsent]
        self._num_unsent -= 1
        self._num_owed -= frame.is_owed
        self.num_unsent_bytes -= len(frame.payload)
        self._drop()

    def payloads(self, from_seq: int, max_bytes: int) -> list[bytes]:
        """Those from from_seq on, which is from oldest_seq to next_seq, until they are more than max_bytes."""
        payloads: list[bytes] = []
        num_bytes = 0
        for frame in islice(self._kept, from_seq - self.oldest_seq, None):
            payloads.append(frame.payload)
            num_bytes += len(frame.payload)
            if num_bytes > max_bytes:
                break
        return payloads

    def _drop(self) -> None:
        """Never the newest one, however large: there would be nothing to replay."""
        while len(self._kept) > max(1, self._num_unsent) and (
            len(self._kept) > self._max_frames or self._num_bytes > self._max_bytes
        ):
            self._num_bytes -= len(self._kept.popleft().payload)
