"""Takes an answer apart as it comes: reasoning, content, calls of tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.answers.answer_format import CallSyntax, ReasoningTags
from cluster.answers.answer_part import AnswerPart, PartKind, joined
from cluster.answers.call_reader import read_calls
from cluster.answers.call_sink import CallSink
from cluster.answers.characters import SPACE, MalformedCall, Reading


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Calls of one answer so far. num_calls: that the client was told of. num_valid: with arguments that are a JSON
    object. num_malformed: with others, or text that began as a call and went on as none. is_open: the last one is not
    complete.
    """

    num_calls: int = 0
    num_valid: int = 0
    num_malformed: int = 0
    is_open: bool = False


class AnswerSplitter(Protocol):
    """One per choice."""

    def push(self, text: str) -> list[AnswerPart]:
        """What more text made certain. Joined, the parts are the same however the text is cut. Never raises."""

    def finish(self) -> list[AnswerPart]:
        """The text ends here: what was held back."""

    @property
    def is_reasoning(self) -> bool: ...

    @property
    def counts(self) -> CallCounts: ...


@dataclass(slots=True, eq=False)
class TagSplitter:
    """An AnswerSplitter by tags and syntaxes of `format_table`.

    - Reasoning is what stands in its tags at the very beginning; everything is, up to the closing tag, if the prompt
      has opened them (is_in_reasoning).
    - A call is one as soon as its name and the beginning of its arguments have been read. What goes wrong before makes
      it content, as it stands; what goes wrong later ends it, and the rest is content. Nothing but tags is lost.
    - White space around reasoning and around calls belongs to the tags; an answer with neither is content as it is.
    - Work is proportional to the text.
    """

    reasoning: ReasoningTags | None
    calls: CallSyntax | None
    offered: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_in_reasoning: bool = False
    _text: str = ""  # not yet decided about
    _state: Callable[[bool], bool] = field(init=False)
    _parts: list[AnswerPart] = field(default_factory=list)
    _drops_space: bool = False  # what comes next stands behind a tag
    _sink: CallSink = field(init=False)
    _reader: Reading[None] | None = None
    _raw: list[str] = field(default_factory=list)  # of a call that has not begun for the client
    _num_before: int = 0  # calls before the present reader began
    _num_broken: int = 0
    _markers: re.Pattern[str] | None = None
    _beginnings: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._sink = CallSink(self.offered)
        self._state = self._begin
        if self.calls is not None:
            markers = [text for text in (self.calls.opener, self.calls.closer, *self.calls.around) if text]
            self._markers = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
            self._beginnings = frozenset(marker[:end] for marker in markers for end in range(1, len(marker)))

    @property
    def is_reasoning(self) -> bool:
        return self._state == self._think or (self._state == self._begin and self.is_in_reasoning)

    @property
    def counts(self) -> CallCounts:
        sink = self._sink
        return CallCounts(sink.num_calls, sink.num_valid, sink.num_malformed + self._num_broken, sink.is_begun)

    def push(self, text: str) -> list[AnswerPart]:
        self._text += text
        while self._text and self._state(False):
            pass
        return self._taken()

    def finish(self) -> list[AnswerPart]:
        while self._text and self._state(True):
            pass
        if self._reader is not None:
            self._reader.close()
            self._take_from_sink()
            if not self._sink.is_begun and not self._is_end_of_call("".join(self._raw)):
                self._break_off("")
        return self._taken()

    def _taken(self) -> list[AnswerPart]:
        parts, self._parts = joined(self._parts), []
        return parts

    # -- states: each takes what it is certain of from the text, and says whether there may be more to do -----------

    def _begin(self, is_last: bool) -> bool:
        """Before anything is known but the prompt."""
        tags = self.reasoning
        rest = self._text.lstrip(SPACE)
        if tags is not None and not is_last and len(rest) < len(tags.opener) and tags.opener.startswith(rest):
            return False
        if tags is not None and rest.startswith(tags.opener):
            self._text = rest[len(tags.opener) :]
            self._state, self._drops_space = self._think, True
        elif self.is_in_reasoning and tags is not None:
            self._state, self._drops_space = self._think, True
        else:
            self._state = self._speak_first
        return True

    def _think(self, is_last: bool) -> bool:
        assert self.reasoning is not None
        closer = self.reasoning.closer
        end = self._text.find(closer)
        if end >= 0:
            self._emit(PartKind.REASONING, self._text[:end].rstrip(SPACE))
            self._text = self._text[end + len(closer) :]
            self._state, self._drops_space = self._speak_first, True
            return True
        held = 0 if is_last else _num_begun(self._text, closer)
        certain = self._text[: len(self._text) - held].rstrip(SPACE)
        self._emit(PartKind.REASONING, certain)
        self._text = "" if is_last else self._text[len(certain) :]
        return False

    def _speak_first(self, is_last: bool) -> bool:
        """At the first character of the content, or behind a bare call: where another bare one may begin."""
        if self.calls is None or not self.calls.is_bare:
            self._state = self._speak
            return True
        rest = self._text.lstrip(SPACE + (";," if self._sink.num_calls else ""))
        if not rest and not is_last:
            return False
        if rest.startswith("{"):
            self._state, self._reader = self._call, self._started(self.calls)
            self._raw, self._text = [self._text[: len(self._text) - len(rest)]], rest
            self._sink.only_offered = True
        else:
            self._state = self._speak
        return True

    def _speak(self, is_last: bool) -> bool:
        found = self._markers.search(self._text) if self._markers is not None else None
        if found is None or self.calls is None:
            self._emit_content(is_last)
            return False
        before = self._text[: found.start()].rstrip(SPACE)
        self._emit(PartKind.CONTENT, before)
        tag, self._text = self._text[len(before) : found.end()], self._text[found.end() :]
        if found[0] == self.calls.opener:
            self._state, self._reader, self._raw = self._call, self._started(self.calls), [tag]
            self._sink.only_offered = False
        elif found[0] == self.calls.closer and not self._sink.num_calls:
            self._emit(PartKind.CONTENT, tag)
        else:
            self._drops_space = True
        return True

    def _call(self, is_last: bool) -> bool:
        assert self._reader is not None
        text, self._text = self._text, ""
        for index, ch in enumerate(text):
            was_begun = self._sink.is_begun
            self._raw.append(ch)
            try:
                self._reader.send(ch)
            except StopIteration:
                self._text = text[index + 1 :]
                self._end_call()
                return True
            except MalformedCall as error:
                self._text = text[index + 1 :]
                self._break_off(error.rest)
                return True
            if was_begun or self._sink.is_begun:
                self._raw.clear()  # the client has it
        self._take_from_sink()
        return False

    # -- -----------------------------------------------------------------------------------------------------------

    def _started(self, syntax: CallSyntax) -> Reading[None]:
        self._num_before = self._sink.num_calls
        reader = read_calls(syntax, self._sink)
        next(reader)
        return reader

    def _end_call(self) -> None:
        self._take_from_sink()
        self._reader, self._raw, self._drops_space = None, [], True
        self._state = self._speak_first

    def _break_off(self, rest: str) -> None:
        """What was read is no call, or goes on after one. rest: what was read last, which may begin something else."""
        self._take_from_sink()
        has_called = self._sink.num_calls > self._num_before
        if self._sink.is_begun:
            self._sink.end()  # counts as malformed: its arguments have no end
        elif not has_called and not self._sink.only_offered:
            self._num_broken += 1
        raw = "".join(self._raw)
        self._drops_space |= has_called
        self._emit(PartKind.CONTENT, raw[: len(raw) - len(rest)])
        self._text = rest + self._text
        self._reader, self._raw, self._state = None, [], self._speak

    def _is_end_of_call(self, raw: str) -> bool:
        """Whether what was read since the last call is no more than the beginning of what ends it."""
        assert self.calls is not None
        has_called = self._sink.num_calls > self._num_before
        return has_called and self.calls.closer.startswith(raw.strip(SPACE + ","))

    def _take_from_sink(self) -> None:
        self._parts += self._sink.parts
        self._sink.parts.clear()

    def _emit_content(self, is_last: bool) -> None:
        """All but what may become a marker, and the white space in front of that."""
        text = self._text
        if self._markers is not None and not is_last:
            longest = max(map(len, self._beginnings), default=0)
            held = next((n for n in range(min(longest, len(text)), 0, -1) if text[-n:] in self._beginnings), 0)
            text = text[: len(text) - held].rstrip(SPACE)
        self._text = self._text[len(text) :]
        self._emit(PartKind.CONTENT, text)

    def _emit(self, kind: PartKind, text: str) -> None:
        if self._drops_space:
            text = text.lstrip(SPACE)
        if text:
            self._drops_space = False
            self._parts.append(AnswerPart(kind, text))


def _num_begun(text: str, tag: str) -> int:
    """How many last characters of the text may be the beginning of a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
