"""The end of `splitserve serve`: the first signal has streams end, a second one ends at once."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TextIO

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.1
# Ray prints it of calls to Serve's controller, which is stopped by killing it.
_LAST_WORDS = ") Task ServeController."


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
            are_not = "request is not" if count == 1 else "requests are not"
            say(f"{count} {are_not} over; waiting up to {deadline_s - clock():.0f} s (again to stop now)")
            told = count
        sleep(_POLL_S)
    return count


@contextlib.contextmanager
def without_last_words() -> Iterator[None]:
    """Within it nothing is printed of calls that the end of Serve's controller has ended: it sounds like a failure."""
    with contextlib.redirect_stdout(_Others(sys.stdout)):
        yield


class _Others(io.TextIOBase):
    """Lines that are not the controller's last words. One thread writes at a time, whole lines, as `print` does."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_dropped = False

    def write(self, text: str) -> int:
        if _LAST_WORDS in text:
            self._has_dropped = True
        elif not (self._has_dropped and text == "\n"):  # the end of its line
            self._has_dropped = False
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()
