"""From what a client wants an answer to look like to the text of a grammar; what would be left out is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson
from llguidance.gbnf_to_lark import gbnf_to_lark

from cluster.grammars.exact_formats import with_exact_formats
from cluster.grammars.grammar_source import GrammarSource
from cluster.grammars.source_bounds import GrammarBounds, SourceRefused, check_schema, schemas_in
from replicas.grammars import grammar_text as texts
from replicas.grammars.control_tokens import with_ids_of_controls

# Those of llguidance 1.9; tests hold this against what it refuses.
KNOWN_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
_IS_GBNF = re.compile(r"::=")
_IS_LARK = re.compile(r"^\s*(start\b[^:=\n]*:(?!:=)|%llguidance\b)", re.MULTILINE)
# Sampling parameters of a rule: there is nobody who would follow them.
_TEMPERATURE = re.compile(r"\[[^\]\n]*\btemperature\s*=")
_OPTIONS = "x-guidance"


def grammar_text(source: GrammarSource, bounds: GrammarBounds, controls: Mapping[str, int]) -> str:
    """As `scheduler.grammar.Grammar` has it. Whether it can be followed only compiling it says. Raises SourceRefused.
    controls: ids of control tokens, by their texts: Lark may name them.

    Work for a process that may be killed: converting GBNF holds the interpreter, and may be long.
    """
    if source.kind == "text":
        return source.text
    if source.kind == "json_object":
        return texts.any_json_object()
    if source.kind == "json_schema":
        return texts.json_schema(_schema(source, bounds))
    if source.kind == "regex":
        return texts.regex(source.text)
    if source.kind == "choice":
        return texts.choice(orjson.loads(source.text))
    return texts.lark(with_ids_of_controls(_lark(source.text), controls))


def _schema(source: GrammarSource, bounds: GrammarBounds) -> dict[str, Any]:
    schema: dict[str, Any] = orjson.loads(source.text)
    check_schema(schema, bounds)
    for part in schemas_in(schema):
        if _OPTIONS in part:
            raise SourceRefused(f"has {_OPTIONS}, which is not supported")
        if "$ref" in part and "$id" in part:  # of which older drafts ignore the second one
            raise SourceRefused("has $id beside $ref, which is not supported")
        name = part.get("format")
        if source.is_lenient and isinstance(name, str) and name not in KNOWN_FORMATS:
            del part["format"]
    with_exact_formats(schema)
    return schema


def _lark(text: str) -> str:
    if _IS_GBNF.search(text) and not _IS_LARK.search(text):
        try:
            return gbnf_to_lark(text)
        except Exception as error:  # whatever that parser stumbles over
            raise SourceRefused(f"can't be read as GBNF: {str(error)[:200]}") from None
    if _TEMPERATURE.search(text):
        raise SourceRefused("has a rule with a temperature, which is not supported")
    return text
