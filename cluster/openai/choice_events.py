"""The server-sent events of one choice of a streamed answer."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.answers.answer_part import PartKind
from cluster.openai.response import json_bytes, sse_event

if TYPE_CHECKING:
    from cluster.openai.response import Answer
    from cluster.text.choice import TextDelta
    from cluster.text.usage import Usage


class ChoiceEvents:
    """Mutable; one per choice. Its chunks differ in nothing but their text, which is filled in: to build and dump the
    whole chunk for each token takes several times as long.
    """

    def __init__(self, answer: Answer, index: int, usage: Callable[[], Usage] | None = None) -> None:
        """usage: the numbers so far, if every chunk is to have them."""
        self._answer, self._index, self._usage = answer, index, usage
        self._opening = answer.opening(index)
        # Whether a chunk has nothing but text.
        self._is_plain = not answer.return_token_ids and answer.report is None and usage is None
        mark = uuid.uuid4().hex  # found nowhere else in a chunk
        self._before, self._after = sse_event(answer.delta(index, mark)).split(json_bytes(mark))

    def of(self, delta: TextDelta) -> bytes:
        """The choice's next events, often a single one; empty when this delta shows nothing. Mutates."""
        if text := self.only_text(delta):
            return b"".join((self._before, json_bytes(text), self._after))
        return b"".join([sse_event(chunk) for chunk in self.chunks(delta)])

    def only_text(self, delta: TextDelta) -> str:
        """What it adds to the content, where that is all that its chunks would tell; else nothing."""
        if not self._is_plain or self._opening is not None or delta.finish_reason is not None:
            return ""
        if delta.parts is None:
            return delta.text
        return delta.parts[0].text if len(delta.parts) == 1 and delta.parts[0].kind is PartKind.CONTENT else ""

    def chunks(self, delta: TextDelta) -> list[dict[str, Any]]:
        """The same before it is written: for whoever makes other events of it. Mutates."""
        chunks: list[dict[str, Any]] = []
        if self._opening is not None:
            chunks.append(self._opening)
            self._opening = None
        ids = () if delta.token_id is None else (delta.token_id,)
        shown = ids if self._answer.return_token_ids else None
        if delta.parts:  # a token's id and log-probability come with the first part that it made certain
            first, *others = delta.parts
            chunks.append(self._answer.part(self._index, first, shown, delta.scored))
            chunks += [self._answer.part(self._index, part, () if shown else None) for part in others]
        elif delta.text or delta.scored or self._answer.return_token_ids:
            chunks.append(self._answer.delta(self._index, delta.text, shown, delta.scored))
        if delta.finish_reason is not None:
            chunks.append(self._answer.finish(self._index, delta.finish_reason))
        if self._usage is not None:
            chunks = [chunk | {"usage": self._usage().as_dict()} for chunk in chunks]
        return chunks
