"""The end of `splitserve serve`: the first signal has streams end, a second one ends at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.1


class StopRequest:
    """Set once, by a signal handler, and waited for by the thread that it interrupts.

    Not an Event: to set one takes a lock that is held for a moment within its `wait`. A handler that runs just then
    would wait for ever for the thread that it stands in, and so would the handler of any further signal.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._gate = threading.Lock()  # shut until it is set
        self._gate.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Blocks for nothing. Mutates."""
        if not self._is_set:
            self._is_set = True
            self._gate.release()

    def wait(self, timeout_s: float) -> bool:
        """Until it is set, or the time is up; whether it is."""
        return self._is_set or self._gate.acquire(timeout=timeout_s) or self._is_set


class StopSignals:
    """Main thread only. `requested` is set by the first SIGINT or SIGTERM; a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = StopRequest()

    def install(self) -> None:
        """From now on. After Ray has set its own handlers."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested.is_set():
            raise KeyboardInterrupt
        self.requested.set()

    def ignore(self) -> None:
        """From now on they do nothing: the end of Ray takes seconds, and is not to be left half done."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def num_open_of(answers: Sequence[object]) -> int | None:
    """Requests that are not over, of what each ingress answered to that question: a number, or the exception that came
    instead. An ingress that has died has none any more; if one did not answer, nobody knows: None.
    """
    from ray.exceptions import ActorDiedError

    known = [0 if isinstance(answer, ActorDiedError) else answer for answer in answers]
    numbers = [answer for answer in known if isinstance(answer, int)]
    return sum(numbers) if len(numbers) == len(known) else None


def wait_for_streams(
    num_open: Callable[[], int | None],
    timeout_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int | None:
    """Until nothing is open any more, or the time is up; how many still are. Blocks.

    num_open: requests that are not over, over all ingresses; None: not known, as one of them does not answer. It may
    answer yet, so it is asked again.
    """
    deadline_s = clock() + timeout_s
    told: int | None = 0
    while (count := num_open()) != 0 and clock() < deadline_s:
        if count != told:
            say(f"{_open(count)}; waiting up to {deadline_s - clock():.0f} s (again to stop now)")
            told = count
        sleep(_POLL_S)
    return count


def _open(count: int | None) -> str:
    if count is None:
        return "an ingress does not answer, so requests may be open"
    return f"{count} {'request is' if count == 1 else 'requests are'} not over"
