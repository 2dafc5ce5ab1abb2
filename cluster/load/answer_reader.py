"""Reads one answer as it comes: server-sent events or a whole body. Pure: bytes and times in, a record filled."""

from __future__ import annotations

from typing import Any

import orjson

from cluster.load.request_record import RequestRecord

_MAX_ERROR_CHARS = 200
_OUTPUT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")  # of a chat's delta


class AnswerReader:
    """Fills a record's tokens and error from the body of a response with status 200.

    A stream has succeeded only if it ended with [DONE] and had neither an error event nor one that is no JSON.
    """

    def __init__(self, record: RequestRecord, streamed: bool) -> None:
        self._record = record
        self._streamed = streamed
        self._rest = b""
        self._is_done = False
        self._has_usage = False

    def feed(self, piece: bytes, now_s: float) -> None:
        """More of the body, received at `now_s`."""
        data = self._rest + piece if self._rest else piece
        if not self._streamed:
            self._rest = data
            return
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)
            elif line.startswith(b"event:") and line[6:].strip() == b"error":
                self._fail("an SSE error event")

    def finish(self) -> None:
        """The body is complete."""
        if not self._streamed:
            self._take_whole()
        elif not self._is_done:
            self._fail("the stream ended without [DONE]")
        record = self._record
        if record.error is None and not self._has_usage:
            record.num_output_tokens = len(record.token_times_s)
        if record.error is None and record.num_output_tokens == 0:
            self._fail("an answer without tokens")

    def _event(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self._is_done = True
            return
        event = self._parse(payload)
        if event is None:
            return
        choices = event.get("choices")
        if choices and _has_tokens(choices[0]):
            self._record.token_times_s.append(now_s)
        self._take_common(event)

    def _take_whole(self) -> None:
        answer = self._parse(self._rest)
        if answer is not None:
            self._take_common(answer)

    def _parse(self, payload: bytes) -> dict[str, Any] | None:
        """The object, or None after noting why it is no good."""
        try:
            value = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self._fail(f"not JSON: {_shown(payload)}")
            return None
        if not isinstance(value, dict) or value.get("error"):
            self._fail(f"an error in the answer: {_shown(payload)}")
            return None
        return value

    def _take_common(self, event: dict[str, Any]) -> None:
        record = self._record
        for choice in event.get("choices") or ():
            if token_ids := choice.get("token_ids"):
                record.output_ids += token_ids
            if choice.get("finish_reason") is not None:
                record.finish_reason = choice["finish_reason"]
        usage = event.get("usage")
        if usage:
            self._has_usage = True
            record.num_input_tokens = usage.get("prompt_tokens", record.num_input_tokens)
            record.num_output_tokens = usage.get("completion_tokens", 0)
            details = usage.get("prompt_tokens_details") or {}
            record.num_cached_tokens = details.get("cached_tokens", record.num_cached_tokens)

    def _fail(self, error: str) -> None:
        if self._record.error is None:  # the first one is the cause
            self._record.error = error


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Whether a streamed choice carries output; opening and closing chunks do not."""
    if choice.get("text") or choice.get("token_ids"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in _OUTPUT_FIELDS)


def _shown(payload: bytes) -> str:
    return payload[:_MAX_ERROR_CHARS].decode(errors="replace")
