"""What other threads want done on the engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty
from typing import NamedTuple

from replicas.timed_queue import TimedQueue


class _Action(NamedTuple):
    run: Callable[[], None]
    request_id: str | None


class Inbox:
    """Any thread puts; the engine's runs, in order. What an action of a request raises costs that request only."""

    def __init__(self, fail: Callable[[str, Exception], None]) -> None:
        """fail: told of the request whose action raised, on the engine's thread."""
        self._fail = fail
        self._actions: TimedQueue[_Action] = TimedQueue()

    def put(self, run: Callable[[], None], request_id: str | None = None) -> None:
        """Does not block. request_id: whom it is for; None: for all of them."""
        self._actions.put(_Action(run, request_id))

    def run(self) -> None:
        """All that is here. Raises what an action for all raises."""
        while True:
            try:
                action = self._actions.get_nowait()
            except Empty:
                return
            self._act(action)

    def wait(self, longest_s: float) -> None:
        """Blocks until something comes, and runs it, at most longest_s. Raises as `run`."""
        try:
            action = self._actions.get(longest_s)
        except Empty:
            return
        self._act(action)

    def _act(self, action: _Action) -> None:
        try:
            action.run()
        except Exception as error:
            if action.request_id is None:
                raise
            self._fail(action.request_id, error)
