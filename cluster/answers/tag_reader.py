"""Reads a call whose function and parameters stand in tags, as Qwen3-Coder writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson

from cluster.answers.answer_format import CallSyntax
from cluster.answers.call_sink import CallSink
from cluster.answers.characters import Reading, literal, skip_space, until
from cluster.answers.parameter_text import is_text

_PARAMETER_ENDS = ("\n</parameter>", "</parameter>")


def read_tags(syntax: CallSyntax, sink: CallSink) -> Reading[None]:
    """A parameter that is a string is passed on as it comes, others when they are complete: only then is it known what
    their text means.
    """
    ch = yield from skip_space()
    yield from literal("<function=", ch)
    name = (yield from until(">")).strip()
    sink.begin(name)
    schema = sink.offered.get(name, {})
    properties = schema.get("properties")
    before = "{"
    while True:
        ch = yield from skip_space()
        yield from literal("<", ch)
        ch = yield
        if ch == "/":
            yield from literal("</function>", "</")
            break
        yield from literal("<parameter=", "<" + ch)
        key = (yield from until(">")).strip()
        sink.arguments(f"{before}{_dumped(key)}: ")
        own = properties.get(key) if isinstance(properties, Mapping) else None
        yield from _parameter(is_text(own, schema), sink.arguments)
        before = ", "
    sink.arguments("{}" if before == "{" else "}")
    sink.end()
    yield from literal(syntax.closer, (yield from skip_space()))


def _parameter(is_string: bool, put: Callable[[str], None]) -> Reading[None]:
    """A parameter's text as JSON of a type that its schema allows."""
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


def _dumped(text: str) -> str:
    return orjson.dumps(text).decode()
