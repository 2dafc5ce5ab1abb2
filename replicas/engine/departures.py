"""What an engine is asked when its requests, or all of it, are to go: by any thread, done on its own."""

from __future__ import annotations

import time
from concurrent.futures import Future
from functools import partial

from replicas.engine.inbox import Inbox
from replicas.engine.open_calls import OpenCalls
from replicas.messages import MigrateCall, MigrateReply


class Departures:
    """Part of an Engine."""

    calls: OpenCalls
    _inbox: Inbox
    _is_leaving = False  # routers are told

    def migrate(self, call: MigrateCall) -> Future[MigrateReply]:
        """Have a running request go on at another engine. Any thread; does not block. The future is always answered."""
        future: Future[MigrateReply] = Future()
        self._inbox.put(partial(self.calls.handoffs.moves.begin, call, future, time.monotonic()))
        return future

    def leave(self) -> None:
        """Routers are told that this engine takes nothing new. Any thread; does not block."""

        def begin() -> None:
            self._is_leaving = True

        self._inbox.put(begin)
