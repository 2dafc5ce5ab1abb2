"""The text of one choice: tokens in, pieces of text out, ended by the model or by a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cluster.answers.answer_part import AnswerPart, joined
from cluster.answers.answer_splitter import CallCounts
from cluster.text.detokenizer import IncrementalDetokenizer
from cluster.text.scored_token import ScoredToken
from cluster.text.stop_strings import StopMatch, StopMatcher

if TYPE_CHECKING:
    from cluster.text.answer_parser import AnswerReading
    from cluster.text.prompt_echo import PromptEcho
    from cluster.text.tokenizer import Tokenizer
    from replicas.messages import Token, TokenLogprobs


class TextDelta(NamedTuple):
    """One token's piece of a choice's text, often empty; finish_reason on the last one: "stop", "length", or, of an
    answer that is taken apart, "tool_calls".

    token_id: None when nothing was generated, but the prompt echoed. scored: the token, and with the first one those of
    an echoed prompt, where log-probabilities were asked for. parts: of an answer that is taken apart, in place of text.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    text: str
    finish_reason: str | None
    token_id: int | None
    scored: tuple[ScoredToken, ...] = ()
    parts: Sequence[AnswerPart] | None = None


class TextChoice:
    """Mutable; one per choice of an answer. Streamed and whole answers are both made of its deltas.

    prompt_logprobs: of the prompt, when they were asked for and have come. sum_logprobs: over the tokens so far, where
    they have any. num_reasoning_tokens: of them, those that the model spent on thinking, tags not included.

    Stop strings are looked for in all that the model writes, what it thinks and calls included, as in vLLM.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        include_stop: bool,
        *,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        echo: PromptEcho | None = None,
        only_echo: bool = False,
        reading: AnswerReading | None = None,
    ) -> None:
        """min_tokens: stop strings are looked for only in the text after so many tokens. reading: takes it apart.

        echo: the prompt, to come before the text. only_echo: and nothing else: the one token generated is dropped.
        """
        self.index = index
        self.num_tokens = 0  # the stop string's last token included, nothing after it
        self.finish_reason: str | None = None
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.sum_logprobs = 0.0
        self.num_reasoning_tokens = 0
        self.parser = "none" if reading is None else reading.parser
        self._splitter = None if reading is None else reading.splitter()
        shown = None if reading is None else reading.shown
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, shown)
        self._matcher = StopMatcher(stops, include_stop)
        self._min_tokens = min_tokens
        self._echo = echo
        self._only_echo = only_echo
        self._offset = 0 if echo is None else len(echo.text)

    def push(self, token: Token) -> TextDelta:
        """The next token. Not to be called after a finish."""
        assert self.finish_reason is None, "a choice has ended once"
        token_id, finish_reason, logprobs = token.token_id, token.finish_reason, token.logprobs
        if self._only_echo:
            self.finish_reason = "length"
            return self._with_echo(TextDelta(self.index, "", self.finish_reason, None), logprobs is not None)
        self.num_tokens += 1
        piece = self._detokenizer.push(token_id)
        match = self._matcher.push(piece) if self.num_tokens > self._min_tokens else StopMatch(piece, None)
        text, matched = match.text_to_emit, match.matched
        if matched is None and finish_reason is not None:
            rest = self._detokenizer.finish()
            piece += rest
            match = self._matcher.push(rest)
            text, matched = text + match.text_to_emit + self._matcher.finish(), match.matched
        if matched is not None:
            self.finish_reason = "stop"
        elif finish_reason is not None:
            self.finish_reason = finish_reason.value
        scored = () if logprobs is None else (self._scored(token_id, piece, logprobs),)
        if self._splitter is not None:
            parts = self._taken_apart(text)
            return TextDelta(self.index, "", self.finish_reason, token_id, scored, parts)
        delta = TextDelta(self.index, text, self.finish_reason, token_id, scored)
        return delta if self._echo is None else self._with_echo(delta, logprobs is not None)

    @property
    def call_counts(self) -> CallCounts:
        """Calls in what has come so far."""
        return CallCounts() if self._splitter is None else self._splitter.counts

    def _taken_apart(self, text: str) -> list[AnswerPart]:
        """A token belongs to the reasoning that it neither opens nor closes. An answer that ends with calls ends for
        them, unless the last one is not complete.
        """
        assert self._splitter is not None
        was_reasoning = self._splitter.is_reasoning
        parts = self._splitter.push(text)
        self.num_reasoning_tokens += was_reasoning and self._splitter.is_reasoning
        if self.finish_reason is not None:
            parts = joined(parts + self._splitter.finish())
            counts = self._splitter.counts
            if self.finish_reason == "stop" and counts.num_calls and not counts.is_open:
                self.finish_reason = "tool_calls"
        return parts

    def _scored(self, token_id: int, piece: str, logprobs: TokenLogprobs) -> ScoredToken:
        token = ScoredToken(token_id, piece, self._offset, logprobs)
        self._offset += len(piece)
        self.sum_logprobs += logprobs.logprob
        return token

    def _with_echo(self, delta: TextDelta, is_scored: bool) -> TextDelta:
        """The first delta, with the prompt before it. The prompt's log-probabilities have come before any token."""
        assert self._echo is not None
        echo, self._echo = self._echo, None
        prompt = echo.tokens(self.prompt_logprobs) if is_scored and self.prompt_logprobs is not None else ()
        return delta._replace(text=echo.text + delta.text, scored=prompt + delta.scored)
