"""How much an ingress does, as a line in the log every ten seconds in which it has something to do."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkDone:
    """Counters since the start, and the requests that are open. On the ingress's event loop.

    num_prompt_tokens: of prompts that have been computed, counted with their first token.
    """

    num_open: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkState:
    """num_waiting: open requests that wait for memory, a slot or a replica. kv_promised: share of decode's KV cache
    that those who were admitted will use, by projection; None while no decode replica has said anything."""

    num_waiting: int
    kv_promised: float | None


class ThroughputLog:
    """One per ingress, on its event loop."""

    def __init__(
        self,
        done: WorkDone,
        state: Callable[[], WorkState],
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._done, self._state, self._interval_s, self._clock = done, state, interval_s, clock
        self._told_s = clock()
        self._told = WorkDone()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), context=contextvars.Context())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self.tell()

    def tell(self) -> None:
        """A line, if there is or was work. What is counted begins anew."""
        done, told, now_s = self._done, self._told, self._clock()
        elapsed_s = max(now_s - self._told_s, 1e-9)
        num_prompt = done.num_prompt_tokens - told.num_prompt_tokens
        num_generated = done.num_generated_tokens - told.num_generated_tokens
        self._told = WorkDone(done.num_open, done.num_prompt_tokens, done.num_generated_tokens)
        self._told_s = now_s
        if not (done.num_open or num_prompt or num_generated):
            return
        state = self._state()
        num_waiting = min(state.num_waiting, done.num_open)
        kv = "KV cache: no replica" if state.kv_promised is None else f"KV cache {state.kv_promised:.0%} promised"
        extra = {
            "event": "throughput",
            "running": done.num_open - num_waiting,
            "waiting": num_waiting,
            "prompt_tokens_per_s": round(num_prompt / elapsed_s, 1),
            "generated_tokens_per_s": round(num_generated / elapsed_s, 1),
            "kv_promised": None if state.kv_promised is None else round(state.kv_promised, 3),
        }
        message = "%d running, %d waiting; prompts %.0f tok/s, generated %.1f tok/s; %s"
        shown = (num_prompt / elapsed_s, num_generated / elapsed_s, kv)
        logger.info(message, extra["running"], num_waiting, *shown, extra=extra)
