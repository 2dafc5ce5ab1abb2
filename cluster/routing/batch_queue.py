"""A queue whose one consumer takes all there is at a time."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

_T = TypeVar("_T")


class BatchQueue(Generic[_T]):
    """Unbounded; one event loop, one consumer. It wakes once for all that came in one turn of the loop: waking a
    task is much of what a token costs.
    """

    def __init__(self) -> None:
        self._items: list[_T] = []
        self._is_closed = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: _T) -> None:
        """Mutates; does not block."""
        self._items.append(item)
        if self._waiter is not None:
            self._wake()

    def close(self) -> None:
        """Nothing more will come. What is here can still be taken."""
        self._is_closed = True
        self._wake()

    async def take(self) -> list[_T]:
        """All that has come, in order, at least one item; empty once closed. Waits; cancelling it loses nothing."""
        while not self._items and not self._is_closed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
