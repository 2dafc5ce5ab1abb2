"""What a client wants an answer to look like, as the client says it: a JSON schema, a regular expression, choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "text"]
KINDS: tuple[GrammarKind, ...] = ("json_schema", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """text: the schema, as JSON, whose keys are in the client's order; empty for json_object, which is any object; the
    regular expression; the choices, as a JSON array; the grammar, in Lark or in GBNF. Of kind text, which no client
    gives, the text of a Grammar, made of those of others.

    is_lenient: a `format` of a schema that nobody knows says nothing, as JSON Schema has it; else it is refused.
    """

    kind: GrammarKind
    text: str
    is_lenient: bool = False
