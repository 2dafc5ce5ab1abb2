"""Reads calls of tools character by character, as coroutines that are sent one after another.

A reader raises MalformedCall where the text is no call, or goes on after one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import orjson

from cluster.text.response.answer_format import CallBody, CallSyntax
from cluster.text.response.answer_part import AnswerPart, PartKind

Result = TypeVar("Result")
Reading: TypeAlias = Generator[None, str, Result]

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENT_KEYS)
_MAX_NAME_CHARS = 256
_PARAMETER_ENDS = ("\n</parameter>", "</parameter>")
# Of JSON outside of strings.
_JSON_CHARACTERS = frozenset('{}[],:"-+.eEtrufalsn0123456789' + _SPACE)
_PAIRS = {"}": "{", "]": "["}


class MalformedCall(Exception):
    """rest: the characters at fault, which have been read but may begin something else."""

    def __init__(self, rest: str) -> None:
        super().__init__(rest)
        self.rest = rest


@dataclass(slots=True)
class CallSink:
    """What readers have found. Mutable.

    offered: the functions that may be called, by name, with the schemas of their parameters.
    parts: found since they were last taken. is_begun: whether the client has the present call's name.
    num_valid, num_malformed: calls that came to their end; a malformed one has arguments that are no JSON object.
    """

    offered: Mapping[str, Mapping[str, Any]]
    only_offered: bool = False
    parts: list[AnswerPart] = field(default_factory=list)
    num_calls: int = 0
    num_valid: int = 0
    num_malformed: int = 0
    is_begun: bool = False
    _arguments: list[str] = field(default_factory=list)

    def begin(self, name: str) -> None:
        """Raises MalformedCall for a name that is none."""
        if not name or len(name) > _MAX_NAME_CHARS or (self.only_offered and name not in self.offered):
            raise MalformedCall("")
        self.is_begun = True
        self._arguments.clear()
        self.parts.append(AnswerPart(PartKind.CALL, name, self.num_calls))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        self._arguments.append(text)
        self.parts.append(AnswerPart(PartKind.ARGUMENTS, text, self.num_calls - 1))

    def end(self) -> None:
        """The call is complete, for better or worse."""
        self.is_begun = False
        try:
            is_valid = isinstance(orjson.loads("".join(self._arguments)), dict)
        except orjson.JSONDecodeError:
            is_valid = False
        self.num_valid += is_valid
        self.num_malformed += not is_valid


def read_calls(syntax: CallSyntax, sink: CallSink) -> Reading[None]:
    """From behind the opener (of a bare call: from its first character) to its end."""
    match syntax.body:
        case CallBody.JSON_LIST:
            return _json_list(sink)
        case CallBody.JSON:
            return _json_objects(syntax, sink)
        case CallBody.NAMED:
            return _named(syntax, sink)
        case CallBody.XML:
            return _xml(syntax, sink)


# -- JSON ---------------------------------------------------------------------------------------------------------


def _json_list(sink: CallSink) -> Reading[None]:
    ch = yield from _skip_space()
    if ch != "[":
        raise MalformedCall(ch)
    while True:
        ch = yield from _skip_space()
        if ch != "{":
            raise MalformedCall(ch)
        yield from _json_object(sink)
        ch = yield from _skip_space()
        if ch == "]":
            return
        if ch != ",":
            raise MalformedCall(ch)


def _json_objects(syntax: CallSyntax, sink: CallSink) -> Reading[None]:
    """One object, or (some models) several in the same tags."""
    ch = yield from _skip_space()
    if ch != "{":
        raise MalformedCall(ch)
    while ch == "{":
        yield from _json_object(sink)
        if not syntax.closer:
            return
        ch = yield from _skip_space()
    yield from _literal(syntax.closer, ch)


def _json_object(sink: CallSink) -> Reading[None]:
    """From behind its brace. Arguments that come behind the name are passed on as they come."""
    name, arguments = "", ""
    ch = yield from _skip_space()
    while ch != "}":
        if ch != '"':
            raise MalformedCall(ch)
        key = _decoded((yield from _string()))
        if sink.only_offered and key not in _KEYS:
            raise MalformedCall("")  # an answer in JSON: it need not wait for its end
        ch = yield from _skip_space()
        if ch != ":":
            raise MalformedCall(ch)
        ch = yield from _skip_space()
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
        if ch == "" or ch in _SPACE:
            ch = yield from _skip_space()
        if ch == ",":
            ch = yield from _skip_space()
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
        while ch not in ",}]" and ch not in _SPACE:
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


# -- a name and JSON ----------------------------------------------------------------------------------------------


def _named(syntax: CallSyntax, sink: CallSink) -> Reading[None]:
    yield from _literal(syntax.before_name)
    name = ""
    while True:
        ch = yield
        if ch == syntax.name_end[0] or ch == "{" or len(name) > _MAX_NAME_CHARS:
            break
        name += ch
    if ch != "{":
        yield from _literal(syntax.name_end, ch)
        ch = yield from _skip_space()
    if ch != "{":
        raise MalformedCall(ch)
    sink.begin(name.strip())
    yield from _value(ch, sink.arguments)
    sink.end()
    if syntax.closer:
        yield from _literal(syntax.closer, (yield from _skip_space()))


# -- tags ---------------------------------------------------------------------------------------------------------


def _xml(syntax: CallSyntax, sink: CallSink) -> Reading[None]:
    """A parameter that is a string is passed on as it comes, others when they are complete: only then is it known what
    their text means.
    """
    ch = yield from _skip_space()
    yield from _literal("<function=", ch)
    name = (yield from _until(">")).strip()
    sink.begin(name)
    properties = sink.offered.get(name, {}).get("properties")
    before = "{"
    while True:
        ch = yield from _skip_space()
        yield from _literal("<", ch)
        ch = yield
        if ch == "/":
            yield from _literal("</function>", "</")
            break
        yield from _literal("<parameter=", "<" + ch)
        key = (yield from _until(">")).strip()
        sink.arguments(f"{before}{_dumped(key)}: ")
        yield from _parameter(properties.get(key) if isinstance(properties, Mapping) else None, sink.arguments)
        before = ", "
    sink.arguments("{}" if before == "{" else "}")
    sink.end()
    yield from _literal(syntax.closer, (yield from _skip_space()))


def _parameter(schema: Any, put: Callable[[str], None]) -> Reading[None]:
    """A parameter's text as JSON of a type that its schema allows; a string where it allows that, or says nothing."""
    types = _types(schema)
    is_string = not types or "string" in types
    pieces: list[str] = []
    if is_string:
        put('"')
    try:
        yield from _parameter_text((lambda ch: put(_dumped(ch)[1:-1])) if is_string else pieces.append)
    except GeneratorExit:
        put("".join(pieces))  # cut off: what there is
        raise
    put('"' if is_string else _as_json("".join(pieces)))


def _parameter_text(put: Callable[[str], None]) -> Reading[None]:
    """Without the line ends that tags stand on lines of their own by."""
    held = yield
    if held == "\n":
        held = ""
    while True:
        while held and not any(end.startswith(held) for end in _PARAMETER_ENDS):
            put(held[0])
            held = held[1:]
        if held in _PARAMETER_ENDS:
            return
        held += yield


def _as_json(text: str) -> str:
    """JSON as the model wrote it, or a string if it is none. Some models write words of Python."""
    word = text.strip()
    word = word.lower() if word in ("True", "False") else "null" if word == "None" else word
    try:
        orjson.loads(word)
    except orjson.JSONDecodeError:
        return _dumped(text)
    return word


def _types(schema: Any) -> set[str]:
    """Names of types that a schema allows; empty: it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else {t for t in declared or () if isinstance(t, str)}
    for word in ("anyOf", "oneOf"):
        choices = schema.get(word)
        for choice in choices if isinstance(choices, list) else ():
            types |= _types(choice)
    return types


def _dumped(text: str) -> str:
    return orjson.dumps(text).decode()


def _until(end: str) -> Reading[str]:
    """The text up to an end, which is read too."""
    pieces: list[str] = []
    while True:
        ch = yield
        pieces.append(ch)
        if ch == end[-1] and (text := "".join(pieces[-len(end) :])) == end:
            return "".join(pieces)[: -len(text)]


# -- single characters --------------------------------------------------------------------------------------------


def _skip_space() -> Reading[str]:
    while True:
        ch = yield
        if ch not in _SPACE:
            return ch


def _literal(expected: str, read: str = "") -> Reading[None]:
    """read: what has been read of it, or in place of it."""
    if not expected.startswith(read):
        raise MalformedCall(read)
    for index in range(len(read), len(expected)):
        ch = yield
        if ch != expected[index]:
            raise MalformedCall(expected[:index] + ch)
