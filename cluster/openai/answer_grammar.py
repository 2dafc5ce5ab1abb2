"""From a request body to the grammar that its answers follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cluster.api_error import ApiError
from cluster.grammars.grammar_compiler import CompilerUnavailable
from cluster.grammars.source_bounds import SourceRefused
from scheduler.grammar import Grammar

if TYPE_CHECKING:
    from cluster.grammars.known_grammars import KnownGrammars
    from cluster.openai.answer_format import FormatFields

# From the ids of a prompt: behind which tokens of the output its answer begins; none: it begins with the first.
BeginsAfter = Callable[[Sequence[int]], tuple[int, ...]]


def at_once(prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """For models that do not think before they answer."""
    return ()


class AnswerGrammars:
    """One per ingress replica."""

    def __init__(self, known: KnownGrammars, begins_after: BeginsAfter = at_once) -> None:
        self._known = known
        self._begins_after = begins_after

    async def of(self, body: FormatFields, prompts: Sequence[Sequence[int]]) -> list[Grammar | None]:
        """One for each prompt, None where an answer may be anything. Raises ApiError: 400, naming the field and what
        of it can't be followed, or 503.
        """
        if (asked := body.answer_format) is None:
            return [None] * len(prompts)
        field, source = asked
        try:
            text = await self._known.text_of(source)
        except SourceRefused as refused:
            raise ApiError(400, f"{field} {refused.reason}", param=field, code="grammar_refused") from None
        except CompilerUnavailable:
            message = "schemas and grammars can't be compiled just now; try again later"
            raise ApiError(503, message, param=field, code="unavailable", retry_after_s=1.0) from None
        return [Grammar(text, self._begins_after(ids)) for ids in prompts]
