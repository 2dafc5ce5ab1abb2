"""The server-sent events of one choice of a streamed answer."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from cluster.openai_response import json_bytes, sse_event

if TYPE_CHECKING:
    from cluster.openai_response import Answer
    from cluster.text_choice import TextDelta


class ChoiceEvents:
    """Mutable; one per choice. Its chunks differ in nothing but their text, which is filled in: to build and dump the
    whole chunk for each token takes several times as long.
    """

    def __init__(self, answer: Answer, index: int) -> None:
        self._answer, self._index = answer, index
        self._opening = answer.opening(index)
        mark = uuid.uuid4().hex  # found nowhere else in a chunk
        self._before, self._after = sse_event(answer.delta(index, mark)).split(json_bytes(mark))

    def of(self, delta: TextDelta) -> bytes:
        """The choice's next events, often a single one; empty when this delta shows nothing. Mutates."""
        if self._opening is None and delta.text and delta.finish_reason is None and not self._answer.return_token_ids:
            return b"".join((self._before, json_bytes(delta.text), self._after))
        events = b""
        if self._opening is not None:
            events, self._opening = sse_event(self._opening), None
        if delta.text or self._answer.return_token_ids:
            ids = (delta.token_id,) if self._answer.return_token_ids else None
            events += sse_event(self._answer.delta(self._index, delta.text, ids))
        if delta.finish_reason is not None:
            events += sse_event(self._answer.finish(self._index, delta.finish_reason))
        return events
