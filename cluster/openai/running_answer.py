"""A generation that runs, and the form that its answer gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cluster.openai.answer_events import AnswerEvents, ChoicesEvents
from cluster.openai.whole_answer import whole_answer

if TYPE_CHECKING:
    from cluster.openai.response import Answer
    from cluster.text.generation import TextGeneration


class RunningAnswer(Protocol):
    """Use once: either as events or whole."""

    @property
    def generation(self) -> TextGeneration: ...

    def events(self) -> AnswerEvents:
        """What its deltas are written as when it is streamed."""

    async def whole(self) -> tuple[dict[str, Any], list[str]]:
        """The body, and why each choice in it ended. Runs to the end. Raises ApiError."""


@dataclass(frozen=True, slots=True)
class RunningCompletion:
    """A RunningAnswer of chat or text completions. num_kept: choices to answer with, of each prompt."""

    generation: TextGeneration
    answer: Answer
    num_kept: int

    def events(self) -> AnswerEvents:
        return ChoicesEvents(self.answer, lambda: self.generation.usage)

    async def whole(self) -> tuple[dict[str, Any], list[str]]:
        return await whole_answer(self.generation, self.answer, self.num_kept)
