"""Schemas within a grammar in Lark, `%json {...}`: bounded and followed as those that come alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import orjson

from cluster.grammars.source_bounds import SourceRefused
from replicas.grammars.lark_pieces import LARK_PIECES

_SPACE = re.compile(r"[ \t\r\n]*")
_TRUE_OR_FALSE = re.compile(r"(true|false)\b")
# Of JSON what says where an object ends.
_BRACKETS = re.compile(r'"(?:\\.|[^"\\])*"|[\[{]|[\]}]', re.DOTALL)


def with_embedded_schemas(lark: str, followed: Callable[[Any], dict[str, Any]]) -> str:
    """followed: of a schema, the object that is followed for it. Raises SourceRefused, as it may."""
    pieces, end = [], 0
    place = 0
    while (found := LARK_PIECES.search(lark, place)) is not None:
        place = found.end()
        if found["json"] is not None:
            begin = place + len(_SPACE.match(lark, place)[0])  # type: ignore[index]  # it matches nothing, too
            place = _end_of_schema(lark, begin)
            try:
                schema = orjson.loads(lark[begin:place])
            except ValueError as error:
                raise SourceRefused(f"has something behind %json that is no JSON: {str(error)[:200]}") from None
            text = orjson.dumps(followed(schema)).decode()
            # As many lines as before: what is said of others names them by number.
            pieces += [lark[end:begin], text[0], "\n" * lark.count("\n", begin, place), text[1:]]
            end = place
    return "".join([*pieces, lark[end:]])


def _end_of_schema(text: str, begin: int) -> int:
    """Where an object, or a true or false, ends that begins there. It is found without recursion: who sends this means
    harm, perhaps."""
    if (found := _TRUE_OR_FALSE.match(text, begin)) is not None:
        return found.end()
    if not text.startswith("{", begin):
        raise SourceRefused("has something behind %json that is no schema")
    depth = 0
    for piece in _BRACKETS.finditer(text, begin):
        depth += (piece[0] in "[{") - (piece[0] in "]}")
        if depth == 0:
            return piece.end()
    raise SourceRefused("has JSON behind %json that does not end")
