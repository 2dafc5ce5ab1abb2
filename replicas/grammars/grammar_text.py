"""Texts of grammars (`scheduler.grammar.Grammar.text`): of JSON Schemas, regular expressions, choices and Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

# The keyword by which llguidance takes options from a schema.
OPTIONS = "x-guidance"
# Between the parts of a JSON text: nothing, a blank, or a new line with its indentation. A small model that may write
# as many blanks as it likes often writes nothing else.
_WHITESPACE = r"\x20|\r?\n[\x20\t]{0,32}"


def json_schema(schema: Mapping[str, Any] | bool, strict: bool = True) -> str:
    """A JSON text that the schema describes; properties come in the schema's order. Any thread, some microseconds.

    strict: a keyword or format that is not supported is refused when the text is compiled; else it is left out.
    oneOf is taken where its alternatives are known to exclude each other; else it is refused, or, if not strict, taken
    for anyOf.
    """
    return json.dumps({"grammars": [{"json_schema": schema_with_options(schema, strict)}]})


def schema_with_options(schema: Mapping[str, Any] | bool, strict: bool = True) -> dict[str, Any]:
    """As `json_schema` has it, to stand behind `%json` in Lark. A client's own options are left out."""
    described = dict(schema) if isinstance(schema, Mapping) else ({} if schema else {"not": {}})
    described[OPTIONS] = {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": True,
        "whitespace_pattern": _WHITESPACE,
        "coerce_one_of": not strict,
        "lenient": not strict,
        "json_allowed_escapes": None,
        "json_allow_general_unicode_escapes": False,
    }
    return described


def any_json_object() -> str:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """A text that the pattern matches as a whole: syntax of Rust's regex, without anchors and look-around."""
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str]) -> str:
    """One of these texts."""
    return lark("start: " + " | ".join(map(lark_string, texts)))


def lark(text: str) -> str:
    """What llguidance's dialect of Lark describes, with `%json {...}` for schemas and `<[id]>` for a token."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def lark_string(text: str) -> str:
    """A literal text, quoted for Lark."""
    return json.dumps(text).replace("\x7f", "\\u007f")
