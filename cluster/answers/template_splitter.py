"""Takes an answer apart by the response template that comes with a checkpoint, as transformers does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from cluster.answers.answer_part import AnswerPart, PartKind, joined
from cluster.answers.answer_splitter import CallCounts

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class TemplateSplitter:
    """An AnswerSplitter over transformers' ResponseParser, to whose rules it keeps. One per choice.

    A call comes whole when it is complete: its text need not be JSON. Where the parser raises, as it does for a call
    that is not what the template says, the text since the last thing that it was certain of is content, and so is all
    that follows.
    """

    def __init__(self, parser: Any, may_call: bool = True) -> None:
        """parser: a transformers ResponseParser that has read the prompt. may_call: else calls are content."""
        self._parser = parser
        self._may_call = may_call
        self._field: str | None = None
        self._is_broken = False
        self._since = ""  # read since the parser last was outside of what has to be complete
        self._num_calls = self._num_malformed = 0
        self._is_call_open = False
        for event in parser.initial_events:
            self._note(event)

    @property
    def is_reasoning(self) -> bool:
        return self._field in _REASONING_FIELDS

    @property
    def counts(self) -> CallCounts:
        return CallCounts(self._num_calls, self._num_calls, self._num_malformed, self._is_call_open)

    def push(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for index, ch in enumerate(text):  # one by one: what an exception takes along does not depend on the cut
            if self._is_broken:
                parts.append(AnswerPart(PartKind.CONTENT, text[index:]))
                break
            self._since += ch
            try:
                events = self._parser.feed(ch)
                for event in events:
                    parts += self._note(event)
            except Exception:
                parts.append(self._broken())
                continue
            if events and events[-1]["type"] == "region_close":
                self._since = ""  # closed by a tag of its own, not by what opens the next one
        return joined(parts)

    def finish(self) -> list[AnswerPart]:
        if self._is_broken:
            return []
        self._is_call_open = self._field == "tool_calls"
        parts: list[AnswerPart] = []
        try:
            _, events = self._parser.finalize()
            for event in events:
                parts += self._note(event)
        except Exception:
            parts += [self._broken()] if self._since else []
        return joined(parts)

    def _note(self, event: Mapping[str, Any]) -> Sequence[AnswerPart]:
        kind, name = event["type"], event["field"]
        self._field = None if kind == "region_close" else name
        if kind == "region_chunk" and not event["dirty"]:
            self._since = self._since[len(event["text"]) :]
            return self._chunk(name, event["text"])
        if kind == "region_close" and name == "tool_calls":
            parts = self._calls(event["value"]) if self._may_call else [AnswerPart(PartKind.CONTENT, self._since)]
            self._since = ""
            return parts
        return ()

    def _chunk(self, name: str, text: str) -> Sequence[AnswerPart]:
        kind = PartKind.REASONING if name in _REASONING_FIELDS else PartKind.CONTENT
        return (AnswerPart(kind, text),)

    def _calls(self, value: Any) -> list[AnswerPart]:
        """Raises whatever comes of a value that is no call."""
        found = []
        for call in value if isinstance(value, list) else [value]:
            name, arguments = call["function"]["name"], call["function"].get("arguments", {})
            if not isinstance(name, str):
                raise TypeError("a function's name is no text")
            found.append((name, arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()))
        parts = []
        for number, (name, arguments) in enumerate(found, start=self._num_calls):
            parts += [AnswerPart(PartKind.CALL, name, number), AnswerPart(PartKind.ARGUMENTS, arguments, number)]
        self._num_calls += len(found)
        self._is_call_open = False
        return parts

    def _broken(self) -> AnswerPart:
        self._is_broken = True
        self._field = None
        self._num_malformed += 1
        return AnswerPart(PartKind.CONTENT, self._since)
