"""Turns of those who wait for one thing: who will be quick before who will be long, else first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class WaitingTurns:
    """On one event loop. Who is quick never waits for more than one who is long; who is long may wait for as long as
    others who are quick come.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._quick: deque[asyncio.Future[None]] = deque()
        self._long: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def turn(self, is_long: bool) -> AsyncIterator[None]:
        """Waits for it. Nobody else has one meanwhile."""
        if self._is_taken:
            waiting = asyncio.get_running_loop().create_future()
            (self._long if is_long else self._quick).append(waiting)
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
        for line in (self._quick, self._long):
            while line:
                waiting = line.popleft()
                if not waiting.done():
                    waiting.set_result(None)
                    return
        self._is_taken = False
