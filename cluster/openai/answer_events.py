"""What a streamed answer is written as: server-sent events, of its deltas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from cluster.openai.choice_events import ChoiceEvents
from cluster.openai.response import SSE_DONE, Answer, sse_error, sse_event

if TYPE_CHECKING:
    from cluster.api_error import ApiError
    from cluster.text.choice import TextDelta
    from cluster.text.usage import Usage


class AnswerEvents(Protocol):
    """Mutable; one per stream. In this order: `of` for all deltas, then `end`; or `failed` at any time, and no more."""

    def of(self, deltas: Iterable[TextDelta]) -> bytes:
        """The events of these deltas; may be empty."""

    def end(self) -> bytes:
        """The last events of an answer that is whole."""

    def failed(self, error: ApiError) -> bytes:
        """The last events of one that is not."""


class ChoicesEvents:
    """AnswerEvents: the chunks of all choices, for chat and text completions."""

    def __init__(self, answer: Answer, usage: Callable[[], Usage]) -> None:
        """usage: the numbers so far."""
        self._answer, self._usage = answer, usage
        self._choices: dict[int, ChoiceEvents] = {}

    def of(self, deltas: Iterable[TextDelta]) -> bytes:
        return b"".join([self._choice(delta.index).of(delta) for delta in deltas])

    def end(self) -> bytes:
        usage = sse_event(self._answer.usage_chunk(self._usage())) if self._answer.include_usage else b""
        return usage + SSE_DONE

    def failed(self, error: ApiError) -> bytes:
        return sse_error(error)

    def _choice(self, index: int) -> ChoiceEvents:
        choice = self._choices.get(index)
        if choice is None:
            usage = self._usage if self._answer.continuous_usage else None
            choice = self._choices[index] = ChoiceEvents(self._answer, index, usage)
        return choice
