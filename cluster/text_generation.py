"""One HTTP request's generation: prompts x n choices, run side by side, as one sequence of text deltas."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from cluster.generation import GenerationItem, GenerationSpec, ScoredPrompt
from cluster.openai_response import Usage
from cluster.text_choice import TextChoice, TextDelta

if TYPE_CHECKING:
    from cluster.request_timer import RequestTimer


class TokenSource(Protocol):
    """What the router does for us; a fake in tests."""

    def generate(self, spec: GenerationSpec) -> AsyncGenerator[GenerationItem, None]: ...


class TextGeneration:
    """Use once. choices: num_choices per spec, in the order of the specs."""

    def __init__(
        self,
        source: TokenSource,
        specs: Sequence[GenerationSpec],
        choices: Sequence[TextChoice],
        timer: RequestTimer,
    ) -> None:
        self._source = source
        self._specs = specs
        self._choices = choices
        self._timer = timer

    def stand_in_line(self, priority: int, client: str) -> None:
        """Where its prompts wait: higher priority goes first, and clients share fairly. Before `deltas`. Mutates."""
        self._specs = [replace(spec, priority=priority, client=client) for spec in self._specs]

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many choices it has."""
        return Usage(
            prompt_tokens=sum(len(spec.prompt_ids) for spec in self._specs),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
        )

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Deltas of all choices as they come. Raises ApiError: the first failure ends all of it.

        Closing the iterator ends all work for the request.
        """
        queue: asyncio.Queue[TextDelta | None] = asyncio.Queue()
        first = 0
        pumps = []
        for spec in self._specs:
            choices = self._choices[first : first + spec.num_choices]
            first += spec.num_choices
            # A context of its own: otherwise Serve would cancel it by itself, in an order that we do not choose.
            pump = asyncio.create_task(self._pump(spec, choices, queue), context=contextvars.Context())
            pump.add_done_callback(lambda _: queue.put_nowait(None))
            pumps.append(pump)
        try:
            for _ in pumps:
                while (delta := await queue.get()) is not None:
                    yield delta
                for pump in pumps:
                    if pump.done():
                        pump.result()
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, spec: GenerationSpec, choices: Sequence[TextChoice], queue: asyncio.Queue[TextDelta | None]
    ) -> None:
        num_open = len(choices)
        async with aclosing(self._source.generate(spec)) as tokens:
            async for token in tokens:
                if isinstance(token, ScoredPrompt):
                    continue
                choice = choices[token.choice]
                if choice.finish_reason is not None:
                    continue  # a stop string has ended it; the others still run
                self._timer.token(choice.index)
                delta = choice.push(token.token_id, token.finish_reason)
                queue.put_nowait(delta)
                num_open -= delta.finish_reason is not None
                if not num_open:
                    return
        raise AssertionError("the tokens ended before every choice had")
