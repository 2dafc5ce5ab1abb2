"""From a request body to the grammar that its answers follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.api_error import ApiError
from cluster.grammars.grammar_compiler import CompilerBusy, CompilerUnavailable
from cluster.grammars.source_bounds import SourceRefused
from scheduler.grammar import Grammar

if TYPE_CHECKING:
    from cluster.grammars.grammar_source import GrammarSource
    from cluster.grammars.known_grammars import KnownGrammars
    from cluster.openai.answer_format import FormatFields

# Who has waited in vain waits in a line that long, and begins at its end again.
_BUSY_RETRY_S = 10.0


class AnswerGrammars:
    """One for each request; makes nothing that costs."""

    def __init__(self, known: KnownGrammars, client: str = "") -> None:
        """client: an opaque label, by which clients share fairly what compiles."""
        self._known = known
        self._client = client

    def for_client(self, client: str) -> AnswerGrammars:
        return AnswerGrammars(self._known, client)

    async def of(self, body: FormatFields) -> Grammar | None:
        """From the first token of an answer on; None: it may be anything. Raises ApiError as `text_of` does."""
        asked = body.answer_format
        return None if asked is None else Grammar(await self.text_of(*asked))

    async def text_of(self, field: str, source: GrammarSource) -> str:
        """The text of its Grammar. field: what the client calls it. Raises ApiError: 400, naming the field and what of
        it can't be followed; 429 or 503.
        """
        try:
            return await self._known.text_of(source, self._client)
        except SourceRefused as refused:
            raise ApiError(400, f"{field} {refused.reason}", param=field, code="grammar_refused") from None
        except CompilerBusy:
            message = "too many schemas and grammars that take long to compile came before; try again later"
            raise ApiError(429, message, param=field, code="queue_full", retry_after_s=_BUSY_RETRY_S) from None
        except CompilerUnavailable:
            message = "schemas and grammars can't be compiled just now; try again later"
            raise ApiError(503, message, param=field, code="unavailable", retry_after_s=1.0) from None
