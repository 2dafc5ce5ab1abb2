"""The simulated clock: what happens when."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum

Action = Callable[[float], None]


class Order(IntEnum):
    """What goes first of what happens at the same time: an engine that wakes finds the messages of that instant."""

    MESSAGE = 0
    WAKE = 1
    SAMPLE = 2


class EventQueue:
    """Actions by time. Of the same time: by order, then by key, then as they were pushed."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, int, int, Action]] = []
        self._num_pushed = 0

    def at(self, time_s: float, order: Order, key: int, action: Action) -> None:
        """Raises ValueError for a time that has passed. Mutates."""
        if time_s < self.now_s:
            raise ValueError(f"an event at {time_s}, but it is {self.now_s} already")
        heapq.heappush(self._heap, (time_s, order, key, self._num_pushed, action))
        self._num_pushed += 1

    def run(self) -> None:
        """Until nothing is left to happen. Mutates."""
        heap = self._heap
        while heap:
            self.now_s, _, _, _, action = heapq.heappop(heap)
            self.num_events += 1
            action(self.now_s)

    def __len__(self) -> int:
        return len(self._heap)
