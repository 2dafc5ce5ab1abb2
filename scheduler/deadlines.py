"""When which request's time is up."""

from __future__ import annotations

import heapq

# Entries of discarded requests that are kept at most, beyond one for each live request.
_SLACK = 64


class Deadlines:
    """One deadline per request id. All operations O(log n) amortised; memory follows the requests that are live."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []  # (deadline, serial, request id), some out of date
        self._serial_of: dict[str, int] = {}  # the entry that counts; an id may come again with another deadline
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._serial_of)

    def add(self, request_id: str, deadline_s: float) -> None:
        self._serial_of[request_id] = self._next_serial
        heapq.heappush(self._heap, (deadline_s, self._next_serial, request_id))
        self._next_serial += 1
        if len(self._heap) > 2 * len(self._serial_of) + _SLACK:
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)

    def discard(self, request_id: str) -> None:
        """The deadline does not matter any more. Unknown ids are ignored."""
        self._serial_of.pop(request_id, None)

    def pop_due(self, now_s: float) -> tuple[str, ...]:
        """Requests whose deadline is `now_s` or earlier, earliest first. Mutates: each is named once."""
        due = []
        while self.next_s is not None and self.next_s <= now_s:
            _, _, request_id = heapq.heappop(self._heap)
            del self._serial_of[request_id]
            due.append(request_id)
        return tuple(due)

    @property
    def next_s(self) -> float | None:
        """The earliest deadline, or None."""
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _counts(self, entry: tuple[float, int, str]) -> bool:
        return self._serial_of.get(entry[2]) == entry[1]
