"""Turns of those who wait for one thing: the quick before the long, and of either kind clients in turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# So many who are quick go before one who is long, at most: they come as long as somebody sends them.
_MOST_QUICK_FIRST = 50


class WaitingTurns:
    """On one event loop. Between two who are long there are 50 who are quick, if so many wait. So who is quick waits
    for one who is long, rarely for two, and nobody waits for all that one client has sent.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._quick, self._long = _Line(), _Line()
        self._num_quick_first = 0

    @asynccontextmanager
    async def turn(self, is_long: bool, client: str = "") -> AsyncIterator[None]:
        """Waits for it. Nobody else has one meanwhile. client: an opaque label."""
        if self._is_taken:
            waiting = asyncio.get_running_loop().create_future()
            (self._long if is_long else self._quick).add(client, waiting)
            try:
                await waiting
            except asyncio.CancelledError:
                if waiting.done() and not waiting.cancelled():  # it was given the turn just before
                    self._next()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        """It stays taken while it passes from one to the other."""
        lines = [self._quick, self._long]
        if self._num_quick_first >= _MOST_QUICK_FIRST:
            lines.reverse()
        for line in lines:
            if (waiting := line.pop()) is not None:
                self._num_quick_first = self._num_quick_first + 1 if line is self._quick else 0
                waiting.set_result(None)
                return
        self._is_taken = False


class _Line:
    """Those of one client first come, first served; of clients each in its turn."""

    def __init__(self) -> None:
        self._of_clients: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def add(self, client: str, waiting: asyncio.Future[None]) -> None:
        self._of_clients.setdefault(client, deque()).append(waiting)

    def pop(self) -> asyncio.Future[None] | None:
        """The next one who has not gone; None: there is nobody."""
        while self._of_clients:
            client, line = self._of_clients.popitem(last=False)
            while line and line[0].done():
                line.popleft()
            if line:
                waiting = line.popleft()
                if line:
                    self._of_clients[client] = line
                return waiting
        return None
