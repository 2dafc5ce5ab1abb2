"""Answers of the API: whole bodies, stream chunks, and their bytes."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from cluster.answers.answer_part import AnswerPart
from cluster.api_error import ApiError
from cluster.openai.logprobs import LogprobsReport, chat_logprobs, completion_logprobs
from cluster.openai.message_parts import part_delta, whole_message
from cluster.text.scored_token import ScoredToken
from cluster.text.usage import Usage

SSE_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice. finish_reason: "stop", "length" or "tool_calls". token_ids: only when the client asked.

    parts: of an answer that is taken apart, in place of text.
    tokens: for `logprobs`, if the answer has them. prompt_logprobs: in their final form, where they were asked for.
    """

    index: int
    text: str
    finish_reason: str
    token_ids: tuple[int, ...] | None = None
    tokens: tuple[ScoredToken, ...] = ()
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    parts: tuple[AnswerPart, ...] | None = None


@dataclass(frozen=True, slots=True)
class Answer(ABC):
    """The shape of one request's answer. Every method returns a JSON object and changes nothing.

    A stream is, in this order: `opening` of each choice if there is one; `delta`s of any choice; one `finish` for
    each choice, after its last delta; `usage_chunk` if include_usage; then SSE_DONE. After an error event nothing
    follows, SSE_DONE neither: that is how a client tells a failed stream from a finished one.

    created: Unix time in seconds. include_usage: chunks have "usage": null, as the last one has the numbers.
    continuous_usage: the chunks have the numbers so far instead. return_token_ids: vLLM's extension; choices and chunks
    have the ids that their text was made of. report: for log-probabilities. has_short_ids: of calls, as templates of
    Mistral's demand.
    """

    id: str
    model: str
    created: int
    include_usage: bool = False
    return_token_ids: bool = False
    system_fingerprint: str | None = None
    continuous_usage: bool = False
    report: LogprobsReport | None = None
    has_short_ids: bool = False

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk that comes before any text of a choice, or None."""

    @abstractmethod
    def delta(
        self, index: int, text: str, token_ids: Sequence[int] | None = None, tokens: Sequence[ScoredToken] = ()
    ) -> dict[str, Any]:
        """A chunk with more text of a choice. token_ids, tokens: those it was made of, when the client asked."""

    def part(
        self,
        index: int,
        part: AnswerPart,
        token_ids: Sequence[int] | None = None,
        tokens: Sequence[ScoredToken] = (),
    ) -> dict[str, Any]:
        """`delta` with a part of an answer that is taken apart; only a chat's is."""
        raise NotImplementedError

    @abstractmethod
    def finish(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The chunk that ends a choice. It has no text."""

    @abstractmethod
    def _whole_choice(self, choice: Choice) -> dict[str, Any]: ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream with include_usage. It has no choices."""
        return self._head(self.chunk_object) | {"choices": [], "usage": usage.as_dict()}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed. choices: in the order of their index."""
        parts = [self._whole_choice(choice) for choice in choices]
        return self._head(self.whole_object) | {"choices": parts, "usage": usage.as_dict()}

    def _head(self, kind: str) -> dict[str, Any]:
        head: dict[str, Any] = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        if self.system_fingerprint is not None:
            head["system_fingerprint"] = self.system_fingerprint
        return head

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._head(self.chunk_object) | {"choices": [choice]}
        return chunk | {"usage": None} if self.include_usage else chunk


@dataclass(frozen=True, slots=True)
class ChatAnswer(Answer):
    """chat.completion and its chunks."""

    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        return self._delta_chunk(index, {"role": "assistant", "content": ""}, None)

    def delta(
        self, index: int, text: str, token_ids: Sequence[int] | None = None, tokens: Sequence[ScoredToken] = ()
    ) -> dict[str, Any]:
        return self._delta_chunk(index, {"content": text}, None, token_ids, tokens)

    def part(
        self,
        index: int,
        part: AnswerPart,
        token_ids: Sequence[int] | None = None,
        tokens: Sequence[ScoredToken] = (),
    ) -> dict[str, Any]:
        return self._delta_chunk(index, part_delta(part, self.has_short_ids), None, token_ids, tokens)

    def finish(self, index: int, finish_reason: str) -> dict[str, Any]:
        return self._delta_chunk(index, {}, finish_reason)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        # Not super(): in a dataclass with slots that is another class.
        whole = Answer.whole(self, choices, usage)
        prompt = choices[0].prompt_logprobs
        return whole if prompt is None else whole | {"prompt_logprobs": prompt}

    def _delta_chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None,
        token_ids: Sequence[int] | None = None,
        tokens: Sequence[ScoredToken] = (),
    ) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._chunk(_with_ids(choice, token_ids))

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        report = self.report
        if report is None or report.num_top is None:
            return None
        return chat_logprobs(tokens, report.num_top, report.names)

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        if choice.parts is None:
            message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            message = whole_message(choice.parts, self.has_short_ids)
        logprobs = self._logprobs(choice.tokens)
        whole = {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        return _with_ids(whole, choice.token_ids)


@dataclass(frozen=True, slots=True)
class CompletionAnswer(Answer):
    """text_completion, whole and in chunks of the same shape."""

    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def opening(self, index: int) -> None:
        return None

    def delta(
        self, index: int, text: str, token_ids: Sequence[int] | None = None, tokens: Sequence[ScoredToken] = ()
    ) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if tokens else None
        return self._chunk(_with_ids(_text_choice(index, text, None, logprobs), token_ids))

    def finish(self, index: int, finish_reason: str) -> dict[str, Any]:
        return self._chunk(_text_choice(index, "", finish_reason, None))

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        whole = _text_choice(choice.index, choice.text, choice.finish_reason, self._logprobs(choice.tokens))
        if choice.prompt_logprobs is not None:
            whole |= {"prompt_logprobs": choice.prompt_logprobs}
        return _with_ids(whole, choice.token_ids)

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        report = self.report
        if report is None or report.num_top is None:
            return None
        return completion_logprobs(tokens, report.num_top, report.names)


def new_chat_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


def new_completion_id() -> str:
    return f"cmpl-{uuid.uuid4().hex}"


def json_bytes(value: Mapping[str, Any] | str) -> bytes:
    """A response body, or a text in one: UTF-8, not escaped further than JSON demands."""
    return orjson.dumps(value)


def sse_event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event. JSON has no raw line ends, so whatever the text, it is a single line."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def sse_error(error: ApiError) -> bytes:
    """The event that ends a stream which failed after its headers were sent."""
    return sse_event(error.envelope())


def _with_ids(choice: dict[str, Any], token_ids: Sequence[int] | None) -> dict[str, Any]:
    """vLLM's name and place for them."""
    return choice if token_ids is None else choice | {"token_ids": list(token_ids)}


def _text_choice(index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
