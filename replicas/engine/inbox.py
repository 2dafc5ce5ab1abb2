"""What other threads want done on the engine's thread, between two steps."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

Action = Callable[[], None]


class Inbox:
    """`post` from any thread; everything else on the engine's. Actions run in the order they came in."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Action] = queue.SimpleQueue()

    def post(self, action: Action) -> None:
        """Does not block."""
        self._actions.put(action)

    def run_until(self, deadline_s: float) -> None:
        """Run what is there, and what comes until then on the monotonic clock. Blocks until then."""
        while True:
            wait_s = deadline_s - time.monotonic()
            try:
                action = self._actions.get(timeout=wait_s) if wait_s > 0 else self._actions.get_nowait()
            except queue.Empty:
                if wait_s <= 0:
                    return
            else:
                action()

    def run_all(self) -> None:
        """Run what is there. Does not block."""
        self.run_until(0.0)

    def run_next(self, longest_s: float) -> None:
        """Run what is there or comes first. Blocks until it does, or for so long."""
        try:
            action = self._actions.get(timeout=longest_s)
        except queue.Empty:
            return
        action()
