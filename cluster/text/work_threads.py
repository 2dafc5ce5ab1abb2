"""Threads for work on texts and bodies: it would hold the event loop, and with it every other request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from cluster.api_error import ApiError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# What is done with more bytes or characters than this waits in a line of its own.
LONG = 32_768
# With no more than this it takes less time than the way to a thread and back, which a busy event loop makes longer yet.
SHORT = 512
_NUM_LONG_AT_ONCE = 2
# Together they hold as many bodies at most, and two are read at a time: whoever comes later is served sooner by another
# ingress, or when it comes again. A request with many long prompts has as many of these.
_MOST_LONG = 256


class WorkThreads:
    """One per ingress replica. Very short work is done at once. Long work is done two at a time: it neither fills the
    threads that short work needs, nor takes many cores or much memory at once. How much of it waits is bounded.
    """

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(_NUM_LONG_AT_ONCE, "long-work")
        self._num_long = 0

    async def run(
        self, size: int, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """What work(*args, **kwargs) returns or raises. size: of what it works on, in bytes or characters. Raises
        ApiError 429 for long work when too much of it waits."""
        if size <= SHORT:
            return work(*args, **kwargs)
        if size <= LONG:
            return await asyncio.to_thread(work, *args, **kwargs)
        if self._num_long >= _MOST_LONG:
            message = f"{self._num_long} long prompts are being read here, the most allowed; try again later"
            raise ApiError(429, message, code="queue_full", retry_after_s=2.0)
        self._num_long += 1
        done = asyncio.get_running_loop().run_in_executor(self._long, lambda: work(*args, **kwargs))
        done.add_done_callback(self._over)
        return await done

    def _over(self, _: object) -> None:
        self._num_long -= 1
