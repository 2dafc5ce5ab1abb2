"""Threads for work on texts and bodies: it would hold the event loop, and with it every other request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# What is done with more bytes or characters than this waits in a line of its own.
LONG = 32_768
# With no more than this it takes less time than the way to a thread and back, which a busy event loop makes longer yet.
SHORT = 512
_NUM_LONG_AT_ONCE = 2


class WorkThreads:
    """One per ingress replica. Very short work is done at once. Long work is done two at a time: it neither fills the
    threads that short work needs, nor takes many cores or much memory at once.
    """

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(_NUM_LONG_AT_ONCE, "long-work")

    async def run(
        self, size: int, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """What work(*args, **kwargs) returns or raises. size: of what it works on, in bytes or characters."""
        if size <= SHORT:
            return work(*args, **kwargs)
        if size <= LONG:
            return await asyncio.to_thread(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._long, lambda: work(*args, **kwargs))
