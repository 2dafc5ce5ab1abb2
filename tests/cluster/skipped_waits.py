"""Waits that take no time: when nobody has anything to do, the event loop's time goes on to the next timer.

For tests in which everything happens on one event loop. Their deadlines are of a time that only waiting spends: no
pause of the machine, however long, changes what they see.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.simulated_cluster.virtual_time import GoesRound, NothingToDo, VirtualClock, stood_in

_PACKAGES = ("cluster", "replicas", "scheduler", "tests.cluster")
ROUNDING_S = 1e-6  # of a difference of two times
_PATIENCE_S = 120.0  # of real time, with no timer to go on to
_MOST_TURNS_AT_ONCE = 100_000  # of the loop, while time stands still: more, and something goes round for ever
_LONGEST_S = 100_000.0  # in one test: more, and somebody waits for ever beside what comes round by the clock


@contextmanager
def skipped_clock() -> Iterator[VirtualClock]:
    """The clock of our modules, and of tests that are imported by now, until the end.

    It begins with the same time in each run: what is left of a deadline is rounded alike.
    """
    clock = VirtualClock()
    with stood_in(_PACKAGES, clock):
        yield clock


def skip_waits(loop: asyncio.AbstractEventLoop, clock: VirtualClock) -> None:
    """Mutates the loop, for good: it goes by this clock, and instead of waiting it puts the clock forward."""
    ours: Any = loop
    selector = _Skipping(ours._selector, clock)
    in_thread = ours.run_in_executor

    def counted(*arguments: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = in_thread(*arguments)
        selector.num_working += 1
        future.add_done_callback(selector.has_worked)
        return future

    ours.time, ours._selector, ours.run_in_executor = clock.monotonic, selector, counted


class _Skipping:
    """A selector that takes what is there now, and else lets the time pass that it may wait for it.

    None passes while one of the loop's threads works. Raises NothingToDo if nothing comes, and GoesRound where
    somebody is busy for ever without waiting.
    """

    def __init__(self, real: selectors.BaseSelector, clock: VirtualClock) -> None:
        self._real, self._clock, self._end_s = real, clock, clock.now_s + _LONGEST_S
        self.num_working = self._num_turns = 0

    def select(self, timeout_s: float | None) -> list[Any]:
        self._num_turns = self._num_turns + 1 if timeout_s == 0.0 else 0
        if self._num_turns > _MOST_TURNS_AT_ONCE:
            raise GoesRound
        # Without a timer only a thread or a socket can wake anybody.
        must_wait = timeout_s is None or (timeout_s > 0.0 and self.num_working)
        there = self._real.select(_PATIENCE_S if must_wait else 0.0)
        if there:
            return there
        if timeout_s is None or self._clock.now_s > self._end_s:
            raise NothingToDo
        self._clock.now_s += max(0.0, timeout_s)
        return []

    def has_worked(self, _: asyncio.Future[Any]) -> None:
        self.num_working -= 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
