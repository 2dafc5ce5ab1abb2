"""How large a JSON schema may be, and what is refused before it is compiled. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Where a schema has further schemas: by name, in a list, one.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "contentSchema",
)


class SourceRefused(Exception):
    """What a client wants an answer to look like is not followed here. reason: for people, goes on after the field's
    name."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class GrammarBounds:
    """As the config's limits of the same names. max_grammar_seconds: of CPU time, to compile one."""

    max_grammar_depth: int
    max_schema_properties: int
    max_grammar_patterns: int
    max_enum_values: int
    max_grammar_seconds: float


def check_schema(schema: Any, bounds: GrammarBounds) -> None:
    """Raises SourceRefused, naming the limit and the number. Takes any JSON."""
    if _is_deeper(schema, bounds.max_grammar_depth):
        raise SourceRefused(f"is nested more than {bounds.max_grammar_depth} levels deep, the most allowed")
    num_properties = num_patterns = num_values = 0
    for part in schemas_in(schema):
        names = [*_length_of(part, "properties", dict), *_length_of(part, "required", list)]
        num_properties += max(names, default=0)
        num_patterns += ("pattern" in part) + sum(_length_of(part, "patternProperties", dict))
        num_values += sum(_length_of(part, "enum", list))
    for number, most, what in (
        (num_properties, bounds.max_schema_properties, "properties"),
        (num_patterns, bounds.max_grammar_patterns, "patterns"),
        (num_values, bounds.max_enum_values, "enum values"),
    ):
        if number > most:
            raise SourceRefused(f"has {number} {what}; at most {most} are allowed")


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects that are schemas: the schema itself and those within, outermost first. Not what only looks like one,
    such as a property that is called properties, or a value of an enum.
    """
    open_schemas = [schema]
    while open_schemas:
        part = open_schemas.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for name in _MAPS:
            open_schemas += part[name].values() if isinstance(part.get(name), dict) else ()
        for name in _LISTS:
            open_schemas += part[name] if isinstance(part.get(name), list) else ()
        for name in _SINGLE:
            inner = part.get(name)
            open_schemas += inner if isinstance(inner, list) else [inner]


def _length_of(part: dict[str, Any], name: str, kind: type) -> Iterator[int]:
    value = part.get(name)
    if isinstance(value, kind):
        yield len(value)  # type: ignore[arg-type]


def _is_deeper(value: Any, most: int) -> bool:
    """Whether there are more levels of objects and arrays than that."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        inner = (part for item in level for part in (item.values() if isinstance(item, dict) else item))
        level = [part for part in inner if isinstance(part, dict | list)]
    return bool(level)
