"""Reads calls whose arguments are JSON: in an object with the function's name, or behind it."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from cluster.answers.answer_format import CallSyntax
from cluster.answers.call_sink import MAX_NAME_CHARS, CallSink
from cluster.answers.characters import SPACE, MalformedCall, Reading, literal, skip_space

_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENT_KEYS)
# Of JSON outside of strings.
_JSON_CHARACTERS = frozenset('{}[],:"-+.eEtrufalsn0123456789' + SPACE)
_PAIRS = {"}": "{", "]": "["}


def read_json_list(sink: CallSink) -> Reading[None]:
    ch = yield from skip_space()
    if ch != "[":
        raise MalformedCall(ch)
    while True:
        ch = yield from skip_space()
        if ch != "{":
            raise MalformedCall(ch)
        yield from _json_object(sink)
        ch = yield from skip_space()
        if ch == "]":
            return
        if ch != ",":
            raise MalformedCall(ch)


def read_json(syntax: CallSyntax, sink: CallSink) -> Reading[None]:
    """One object, or (some models) several in the same tags."""
    ch = yield from skip_space()
    if ch != "{":
        raise MalformedCall(ch)
    while ch == "{":
        yield from _json_object(sink)
        if not syntax.closer:
            return
        ch = yield from skip_space()
    yield from literal(syntax.closer, ch)


def _json_object(sink: CallSink) -> Reading[None]:
    """From behind its brace. Arguments that come behind the name are passed on as they come."""
    name, arguments = "", ""
    ch = yield from skip_space()
    while ch != "}":
        if ch != '"':
            raise MalformedCall(ch)
        key = _decoded((yield from _string()))
        if sink.only_offered and key not in _KEYS:
            raise MalformedCall("")  # an answer in JSON: it need not wait for its end
        ch = yield from skip_space()
        if ch != ":":
            raise MalformedCall(ch)
        ch = yield from skip_space()
        if key in _ARGUMENT_KEYS and name and ch == "{" and not arguments:
            sink.begin(name)
            arguments = "{"
            ch = yield from _value(ch, sink.arguments)
        else:
            pieces: list[str] = []
            ch = yield from _value(ch, pieces.append)
            if key == "name" and not name:
                name = _decoded("".join(pieces))
            elif key in _ARGUMENT_KEYS and not arguments:
                arguments = _as_object("".join(pieces))
        if ch == "" or ch in SPACE:
            ch = yield from skip_space()
        if ch == ",":
            ch = yield from skip_space()
        elif ch != "}":
            raise MalformedCall(ch)
    if not sink.is_begun:
        sink.begin(name)
        sink.arguments(arguments or "{}")
    sink.end()


def _as_object(text: str) -> str:
    """Arguments that are no object: none at all, or the object written as a string."""
    if text.startswith('"'):
        return _decoded(text)
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise MalformedCall("")
    return text


def _decoded(text: str) -> str:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise MalformedCall("") from None
    if not isinstance(value, str):
        raise MalformedCall("")
    return value


def _string() -> Reading[str]:
    """The rest of a string whose quote has been read: all of it, quotes included."""
    pieces = ['"']
    yield from _string_rest(pieces.append)
    return "".join(pieces)


def _string_rest(put: Callable[[str], None]) -> Reading[None]:
    while True:
        ch = yield
        put(ch)
        if ch == '"':
            return
        if ch == "\\":
            put((yield))


def _value(ch: str, put: Callable[[str], None]) -> Reading[str]:
    """A value from its first character on, passed on as it stands. Returns the character behind a number or a word."""
    if ch == '"':
        put(ch)
        yield from _string_rest(put)
        return ""
    if ch not in "{[":
        while ch not in ",}]" and ch not in SPACE:
            if ch not in _JSON_CHARACTERS:
                raise MalformedCall(ch)
            put(ch)
            ch = yield
        return ch
    opened: list[str] = []
    while True:
        if ch not in _JSON_CHARACTERS:
            raise MalformedCall(ch)
        if ch in _PAIRS and opened.pop() != _PAIRS[ch]:
            raise MalformedCall(ch)
        put(ch)
        if ch in "{[":
            opened.append(ch)
        elif ch == '"':
            yield from _string_rest(put)
        if not opened:
            return ""
        ch = yield


def read_named(syntax: CallSyntax, sink: CallSink) -> Reading[None]:
    yield from literal(syntax.before_name)
    name = ""
    while True:
        ch = yield
        if ch == syntax.name_end[0] or ch == "{" or len(name) > MAX_NAME_CHARS:
            break
        name += ch
    if ch != "{":
        yield from literal(syntax.name_end, ch)
        ch = yield from skip_space()
    if ch != "{":
        raise MalformedCall(ch)
    sink.begin(name.strip())
    yield from _value(ch, sink.arguments)
    sink.end()
    if syntax.closer:
        yield from literal(syntax.closer, (yield from skip_space()))
