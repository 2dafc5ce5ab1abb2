"""A queue whose waits end when their time is up."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from queue import Empty
from typing import Generic, TypeVar

T = TypeVar("T")


class TimedQueue(Generic[T]):
    """Any thread puts, one takes, in order.

    Not queue.SimpleQueue: its get(timeout) may wait for ever. In CPython 3.11 (_queuemodule.c), when it has got its
    lock and finds nothing, it computes what is left of the timeout; where the thread lost its CPU meanwhile, that is
    less than nothing, which the lock takes for no limit. With waits of 0.1 ms on a busy machine that happens: a
    transfer thread stood so until its process was ended. queue.Queue waits right, in four times the time.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._something = threading.Lock()  # held while nothing has been put since the last look
        self._something.acquire()

    def put(self, item: T) -> None:
        """Does not block. Any thread."""
        self._items.append(item)
        with suppress(RuntimeError):  # it is released already: who takes has not looked since
            self._something.release()

    def get_nowait(self) -> T:
        """Raises Empty."""
        try:
            return self._items.popleft()
        except IndexError:
            raise Empty from None

    def get(self, timeout_s: float) -> T:
        """Blocks until there is something, for so long at most. Raises Empty."""
        with suppress(IndexError):
            return self._items.popleft()
        deadline_s = time.monotonic() + timeout_s
        # The lock may have been released for what was taken before: so it may have to be taken twice.
        while self._something.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            with suppress(IndexError):
                return self._items.popleft()
        raise Empty
