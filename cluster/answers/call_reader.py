"""Reads calls of tools by their syntax. Readers raise MalformedCall where a text is no call, or goes on after one."""

from __future__ import annotations

from cluster.answers.answer_format import CallBody, CallSyntax
from cluster.answers.call_sink import CallSink
from cluster.answers.characters import Reading
from cluster.answers.json_reader import read_json, read_json_list, read_named
from cluster.answers.tag_reader import read_tags


def read_calls(syntax: CallSyntax, sink: CallSink) -> Reading[None]:
    """From behind the opener (of a bare call: from its first character) to its end."""
    match syntax.body:
        case CallBody.JSON_LIST:
            return read_json_list(sink)
        case CallBody.JSON:
            return read_json(syntax, sink)
        case CallBody.NAMED:
            return read_named(syntax, sink)
        case CallBody.XML:
            return read_tags(syntax, sink)
