"""One HTTP request's generation: prompts x n choices, run side by side, as one sequence of text deltas."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from cluster.routing.batch_queue import BatchQueue
from cluster.routing.generation import Generation, GenerationItem
from cluster.text.choice import TextChoice, TextDelta
from cluster.text.usage import Usage
from replicas.messages import GenerationSpec, PromptLogprobs

if TYPE_CHECKING:
    from cluster.monitoring.request_timer import RequestTimer


class TokenSource(Protocol):
    """What the router does for us; a fake in tests."""

    def generate(self, generation: Generation) -> AsyncGenerator[list[GenerationItem], None]: ...


class TextGeneration:
    """Use once. generations: one a prompt. choices: num_answers of each, in their order."""

    def __init__(
        self,
        source: TokenSource,
        generations: Sequence[Generation],
        choices: Sequence[TextChoice],
        timer: RequestTimer,
        thinks: bool = False,
        has_cache: bool = False,
        has_prediction: bool = False,
    ) -> None:
        """thinks: whether usage has tokens that were spent on thinking. has_cache: whether it has those that were found
        in a prefix cache. has_prediction: whether it has those that the client's prediction had right."""
        self._source = source
        self._generations = generations
        self._choices = choices
        self._timer = timer
        self._thinks, self._has_cache, self._has_prediction = thinks, has_cache, has_prediction

    @property
    def _specs(self) -> list[GenerationSpec]:
        return [of_prompt.spec for of_prompt in self._generations]

    @property
    def generation_ids(self) -> list[str]:
        """Of each prompt: what the log calls it."""
        return [of_prompt.generation_id for of_prompt in self._generations]

    def prompt_ids(self, index: int) -> tuple[int, ...]:
        """The prompt of a choice."""
        for spec in self._specs:
            if index < spec.num_answers:
                return spec.prompt_ids
            index -= spec.num_answers
        raise IndexError("no such choice")

    def best(self, num_kept: int) -> list[TextChoice]:
        """Of each prompt's choices the num_kept with the highest mean log-probability a token, the best first.

        All of them in their own order when there are no more. Once all have ended.
        """
        kept: list[TextChoice] = []
        first = 0
        for spec in self._specs:
            choices = list(self._choices[first : first + spec.num_answers])
            first += spec.num_answers
            if len(choices) > num_kept:
                choices.sort(key=lambda choice: choice.sum_logprobs / max(1, choice.num_tokens), reverse=True)
            kept += choices[:num_kept]
        return kept

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many choices it has."""
        drafts = [one.drafts for one in self._generations] if self._has_prediction else None
        return Usage(
            prompt_tokens=sum(len(spec.prompt_ids) for spec in self._specs),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(one.finding.num_tokens for one in self._generations) if self._has_cache else None,
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices) if self._thinks else None,
            accepted_prediction_tokens=sum(of.num_accepted for of in drafts) if drafts is not None else None,
            rejected_prediction_tokens=sum(of.num_rejected for of in drafts) if drafts is not None else None,
        )

    def deltas(self) -> AsyncGenerator[list[TextDelta], None]:
        """Deltas of all choices as they come, all that are there at a time. Raises ApiError: the first failure ends it.

        Closing the iterator ends all work for the request.
        """
        if len(self._generations) == 1:
            return self._deltas_of(self._generations[0], self._choices)
        return self._side_by_side()

    async def _deltas_of(
        self, generation: Generation, choices: Sequence[TextChoice]
    ) -> AsyncGenerator[list[TextDelta], None]:
        """Of one prompt."""
        num_open = len(choices)
        async with aclosing(self._source.generate(generation)) as batches:
            async for batch in batches:
                deltas = [delta for item in batch if (delta := self._delta(item, choices)) is not None]
                num_open -= sum(delta.finish_reason is not None for delta in deltas)
                if deltas:
                    yield deltas
                if not num_open:
                    return
        raise AssertionError("the tokens ended before every choice had")

    def _delta(self, item: GenerationItem, choices: Sequence[TextChoice]) -> TextDelta | None:
        if isinstance(item, PromptLogprobs):
            for choice in choices:
                choice.prompt_logprobs = item.positions
            return None
        choice = choices[item.choice]
        if choice.finish_reason is not None:
            return None  # a stop string has ended it; the others still run
        delta = choice.push(item)
        if delta.token_id is not None:  # else the prompt was only echoed: its one token is dropped, nobody pays for it
            self._timer.token(choice.index)
        if delta.finish_reason is not None and choice.parser != "none":
            counts = choice.call_counts
            self._timer.calls(choice.parser, counts.num_valid, counts.num_malformed)
        return delta

    async def _side_by_side(self) -> AsyncGenerator[list[TextDelta], None]:
        output: BatchQueue[TextDelta] = BatchQueue()
        pumps: list[asyncio.Task[None]] = []

        def ended(pump: asyncio.Task[None]) -> None:
            if pump.cancelled() or pump.exception() is not None or all(other.done() for other in pumps):
                output.close()

        first = 0
        for generation in self._generations:
            choices = self._choices[first : first + generation.spec.num_answers]
            first += len(choices)
            # A context of its own: otherwise Serve would cancel it by itself, in an order that we do not choose.
            pump = asyncio.create_task(self._pump(generation, choices, output), context=contextvars.Context())
            pump.add_done_callback(ended)
            pumps.append(pump)
        try:
            while deltas := await output.take():
                yield deltas
            for pump in pumps:
                if pump.done():
                    pump.result()
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, generation: Generation, choices: Sequence[TextChoice], output: BatchQueue[TextDelta]) -> None:
        async with aclosing(self._deltas_of(generation, choices)) as batches:
            async for deltas in batches:
                for delta in deltas:
                    output.put(delta)
