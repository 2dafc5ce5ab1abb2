"""The text of one choice: tokens in, pieces of text out, ended by the model or by a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cluster.detokenizer import IncrementalDetokenizer
from cluster.stop_strings import StopMatcher

if TYPE_CHECKING:
    from cluster.tokenizer import Tokenizer
    from replicas.messages import FinishReason


class TextDelta(NamedTuple):
    """One token's piece of a choice's text, often empty; finish_reason ("stop" or "length") on the last one."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    text: str
    finish_reason: str | None
    token_id: int


class TextChoice:
    """Mutable; one per choice of an answer. Streamed and whole answers are both made of its deltas."""

    def __init__(self, index: int, tokenizer: Tokenizer, stops: Sequence[str], include_stop: bool) -> None:
        self.index = index
        self.num_tokens = 0  # the stop string's last token included, nothing after it
        self.finish_reason: str | None = None
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopMatcher(stops, include_stop)

    def push(self, token_id: int, finish_reason: FinishReason | None) -> TextDelta:
        """The next token, and why it is the last one, if it is. Not to be called after a finish."""
        assert self.finish_reason is None, "a choice has ended once"
        self.num_tokens += 1
        match = self._matcher.push(self._detokenizer.push(token_id))
        text, matched = match.text_to_emit, match.matched
        if matched is None and finish_reason is not None:
            match = self._matcher.push(self._detokenizer.finish())
            text, matched = text + match.text_to_emit + self._matcher.finish(), match.matched
        if matched is not None:
            self.finish_reason = "stop"
        elif finish_reason is not None:
            self.finish_reason = finish_reason.value
        return TextDelta(self.index, text, self.finish_reason, token_id)
