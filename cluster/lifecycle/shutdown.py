"""The end of `splitserve serve`: the first signal has streams end, a second one ends at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.1


class StopSignals:
    """Main thread only. `requested` is set by the first SIGINT or SIGTERM; a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = threading.Event()

    def install(self) -> None:
        """From now on. After Ray has set its own handlers."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested.is_set():
            raise KeyboardInterrupt
        self.requested.set()


def wait_for_streams(
    num_open: Callable[[], int],
    timeout_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Until nothing is open any more, or the time is up; how many still are. Blocks.

    num_open: requests that are not over, over all ingresses. Whatever it raises ends the wait: there is nobody to ask.
    """
    deadline_s = clock() + timeout_s
    told = 0
    while (count := num_open()) and clock() < deadline_s:
        if count != told:
            say(f"{count} requests are not over; waiting up to {deadline_s - clock():.0f} s (again to stop now)")
            told = count
        sleep(_POLL_S)
    return count
