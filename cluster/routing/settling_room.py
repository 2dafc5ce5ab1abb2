"""Who waits somewhere and may be sent elsewhere, and for how long nobody is. No I/O; time is an argument."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

# How often it is looked through: replicas tell of room with each frame.
_LOOK_EVERY_S = 0.1
_MAX_DOUBLINGS = 4


class Seat(Protocol):
    """sent_s: to where it waits now. num_moves: how often it was moved already."""

    sent_s: float
    num_moves: int


SeatT = TypeVar("SeatT", bound=Seat)


class SettlingRoom(Generic[SeatT]):
    """One per router and kind of waiting. Not thread-safe.

    settle_s: for so long nobody is moved who has just been sent somewhere, and twice as long after each move: what is
    known of replicas is that old, and nobody is to be sent to and fro.
    """

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._seats: dict[int, SeatT] = {}
        self._looked_s = float("-inf")

    def __len__(self) -> int:
        return len(self._seats)

    def enter(self, seat: SeatT) -> None:
        """Behind all that wait."""
        self._seats[id(seat)] = seat

    def leave(self, seat: SeatT) -> None:
        """It does not wait any more. Idempotent."""
        self._seats.pop(id(seat), None)

    def is_due(self, now_s: float) -> bool:
        """Whether to look now."""
        return bool(self._seats) and now_s - self._looked_s >= _LOOK_EVERY_S

    def _look(self, now_s: float) -> list[SeatT]:
        """All that wait, in the order in which they came in. Mutates: it is not due for a while."""
        self._looked_s = now_s
        return list(self._seats.values())

    def _has_settled(self, seat: SeatT, now_s: float) -> bool:
        return bool(now_s - seat.sent_s >= self._settle_s * 2 ** min(seat.num_moves, _MAX_DOUBLINGS))
