"""What a replica has cached, told to its routers part by part. No torch."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from scheduler.recent_keys import PIECE_KEY_BYTES, RecentKeys

KEYS_IN_PART = 1024  # a router takes them in within a millisecond

_Epoch = Annotated[str, Meta(max_length=4096)]
_Position = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


@dataclass(frozen=True, slots=True)
class KeyPosition:
    """So far a router knows what a replica has cached. epoch: of the replica's log (`scheduler.recent_keys`); empty:
    nothing is known."""

    epoch: _Epoch = ""
    position: _Position = 0


@dataclass(frozen=True, slots=True)
class KeyPart:
    """Keys of pieces that a replica has cached or found, in that order: PIECE_KEY_BYTES each, the first of them at
    position start. end: behind the newest; what is missing up to there is to be asked for.

    A start beyond the position that was asked for is a gap: what lay between is not kept any more. Raises ValueError
    for what no replica says.
    """

    epoch: _Epoch
    start: _Position
    keys: Annotated[bytes, Meta(max_length=KEYS_IN_PART * PIECE_KEY_BYTES)]
    end: _Position

    def __post_init__(self) -> None:
        if len(self.keys) % PIECE_KEY_BYTES or self.stop > self.end:
            raise ValueError(f"{len(self.keys)} bytes of keys from {self.start} on, of which there are {self.end}")

    @property
    def stop(self) -> int:
        """Where the next part begins."""
        return self.start + len(self.keys) // PIECE_KEY_BYTES

    def numbers(self) -> tuple[int, ...]:
        """As `scheduler.recent_keys.piece_number` has them."""
        return struct.unpack(f"<{len(self.keys) // PIECE_KEY_BYTES}Q", self.keys)


def recent_part(log: RecentKeys | None, after: KeyPosition | None) -> KeyPart | None:
    """What follows, or a first part of it; None: nobody asks, or there is no log. Any thread; does not block."""
    if after is None or log is None:
        return None
    return KeyPart(log.epoch, *log.since(after.epoch, after.position, KEYS_IN_PART))
