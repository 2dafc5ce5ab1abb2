"""From what a client wants an answer to look like to the text of a grammar; what would be left out is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson
from llguidance.gbnf_to_lark import gbnf_to_lark

from cluster.grammars.embedded_schemas import with_embedded_schemas
from cluster.grammars.exact_formats import with_exact_formats
from cluster.grammars.grammar_source import GrammarSource
from cluster.grammars.source_bounds import GrammarBounds, SourceRefused, check_schema, schemas_in
from replicas.grammars import grammar_text as texts
from replicas.grammars.control_tokens import with_ids_of_controls
from replicas.grammars.lark_pieces import LARK_PIECES

# Those of llguidance 1.9; tests hold this against what it refuses.
KNOWN_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
_IS_GBNF = re.compile(r"::=")
_IS_LARK = re.compile(r"^\s*(start\b[^:=\n]*:(?!:=)|%llguidance\b)", re.MULTILINE)
# Sampling parameters of a rule: there is nobody who would follow them.
_TEMPERATURE = re.compile(r"\[[^\[\]\n]*\btemperature\s*=")


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
        return texts.json_schema(_followed(orjson.loads(source.text), bounds, source.is_lenient))
    if source.kind == "regex":
        return texts.regex(source.text)
    if source.kind == "choice":
        return texts.choice(orjson.loads(source.text))
    lark = with_embedded_schemas(_lark(source.text), lambda schema: _embedded(schema, bounds))
    return texts.lark(with_ids_of_controls(lark, controls))


def _embedded(schema: Any, bounds: GrammarBounds) -> dict[str, Any]:
    return texts.schema_with_options(_followed(schema, bounds, is_lenient=False))


def _followed(schema: Any, bounds: GrammarBounds, is_lenient: bool) -> Any:
    """What is compiled for a schema. Mutates it. Raises SourceRefused."""
    check_schema(schema, bounds)
    for part in schemas_in(schema):
        if texts.OPTIONS in part:
            raise SourceRefused(f"has {texts.OPTIONS}, which is not supported")
        if "$ref" in part and "$id" in part:  # of which older drafts ignore the second one
            raise SourceRefused("has $id beside $ref, which is not supported")
        name = part.get("format")
        if is_lenient and isinstance(name, str) and name not in KNOWN_FORMATS:
            del part["format"]
    with_exact_formats(schema)
    return schema


def _lark(text: str) -> str:
    if _IS_GBNF.search(text) and not _IS_LARK.search(text):
        try:
            return gbnf_to_lark(text)
        except Exception as error:  # whatever that parser stumbles over
            raise SourceRefused(f"can't be read as GBNF: {str(error)[:200]}") from None
    if _TEMPERATURE.search(LARK_PIECES.sub(" ", text)):
        raise SourceRefused("has a rule with a temperature, which is not supported")
    return text
