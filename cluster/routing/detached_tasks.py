"""Tasks in a context of their own: Serve cancels what a request's context started when its client goes."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def start_detached(coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    """Run it whatever becomes of the request that asked for it. Nobody need wait for its result."""
    task = asyncio.create_task(coroutine, context=contextvars.Context())
    task.add_done_callback(retrieve)
    return task


async def wait_for_any(*futures: asyncio.Future[Any], timeout_s: float | None) -> None:
    """Until one of them is done, or the time is up. Cancels none."""
    timeout_s = None if timeout_s is None else max(0.0, timeout_s)
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def retrieve(future: asyncio.Future[Any]) -> None:
    """Perhaps nobody waits for this result any more: do not let asyncio log it as never retrieved."""
    if not future.cancelled():
        future.exception()
