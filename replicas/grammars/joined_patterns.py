"""How many regular expressions one string would have to match all together, by the text of a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from replicas.grammars.lark_pieces import LARK_PIECES

_DECODER = json.JSONDecoder()
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
# What of a schema is counted in another way, or describes no text by itself.
_APART = ("allOf", "$ref", "$defs", "definitions", "enum", "const")
# What of a schema becomes a regular expression for its own string.
_PATTERNS = ("pattern", "format")
_LENGTHS = ("minLength", "maxLength")


def num_joined_patterns(text: str) -> int:
    """An upper bound; of a JSON Schema exact but for what can't come together anyway. Raises nothing: what is no
    grammar has none. Linear in the text."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return _of_lark(text)
    grammars = said.get("grammars", ()) if isinstance(said, Mapping) else ()
    return max((_of_grammar(one) for one in grammars if isinstance(one, Mapping)), default=0)


def _of_grammar(grammar: Mapping[str, Any]) -> int:
    lark, schema = grammar.get("lark_grammar"), grammar.get("json_schema")
    return max(_of_lark(lark) if isinstance(lark, str) else 0, 0 if schema is None else _OfSchema(schema).most)


def _of_lark(text: str) -> int:
    """Terminals are named: any of them may stand in any other, so all that are joined anywhere count together. What is
    in strings, regular expressions and comments joins nothing."""
    schemas = list(_embedded_schemas(text))
    return max([LARK_PIECES.sub("", text).count("&") + 1, *(_OfSchema(schema).most for schema in schemas)])


def _embedded_schemas(text: str) -> Iterator[Any]:
    for found in _EMBEDDED.finditer(text):
        try:
            yield _DECODER.raw_decode(text, found.end())[0]
        except (ValueError, RecursionError):  # llguidance refuses it, with the place
            continue


class _OfSchema:
    """Each part of a schema is looked at once, what it refers to included."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._by_reference: dict[str, int] = {}
        self.most = 0
        try:
            self.most = max(self.most, self._count(schema))
        except RecursionError:  # llguidance refuses it, by its depth
            self.most = 0

    def _count(self, part: Any) -> int:
        if isinstance(part, list):
            return max(map(self._count, part), default=0)
        if not isinstance(part, Mapping):
            return 0
        own = sum(key in part for key in _PATTERNS) + any(key in part for key in _LENGTHS)
        joined = part.get("allOf")
        own += sum(map(self._count, joined)) if isinstance(joined, list) else 0
        # What is merged with the rest of this part; and what is apart from it, where the larger counts.
        reference = part.get("$ref")
        own += self._referred(reference) if isinstance(reference, str) else 0
        others = [self._count(value) for key, value in part.items() if key not in _APART]
        return own + max(others, default=0)

    def _referred(self, reference: str) -> int:
        if reference not in self._by_reference:
            self._by_reference[reference] = 0  # of a circle
            self._by_reference[reference] = self._count(self._target(reference))
        return self._by_reference[reference]

    def _target(self, reference: str) -> Any:
        found = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, Mapping) else None
        return found
