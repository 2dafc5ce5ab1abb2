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


# Numbers in a schema are followed as doubles, of integers as 64 bits: beyond these not all of them are told apart.
_MOST_EXACT = 2**53
_MOST_INTEGER = 2**63 - 1
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_VALUES = ("const", "enum")


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
        _check_numbers(part)
    for number, most, what in (
        (num_properties, bounds.max_schema_properties, "properties"),
        (num_patterns, bounds.max_grammar_patterns, "patterns"),
        (num_values, bounds.max_enum_values, "enum values"),
    ):
        if number > most:
            raise SourceRefused(f"has {number} {what}; at most {most} are allowed")


def _check_numbers(part: dict[str, Any]) -> None:
    """Raises SourceRefused for a number that would be taken for another one."""
    bounds = [part[name] for name in _BOUNDS if name in part]
    values = [part[name] for name in _VALUES if name in part]
    for number in (*filter(_is_inexact_bound, bounds), *filter(_is_inexact, _leaves(values))):
        raise SourceRefused(f"has a number that is too large to be followed exactly: {number}")


def _is_inexact(value: Any) -> bool:
    """A float may have been an integer of more than 64 bits before it was read."""
    if isinstance(value, int):
        return abs(value) > _MOST_EXACT
    return isinstance(value, float) and abs(value) > _MOST_INTEGER


def _is_inexact_bound(value: Any) -> bool:
    """Of integers of 64 bits the largest one is, and what a double holds."""
    if not isinstance(value, int) or not -_MOST_INTEGER <= value <= _MOST_INTEGER:
        return _is_inexact(value)
    return value != _MOST_INTEGER and int(float(value)) != value


def _leaves(value: Any) -> Iterator[Any]:
    """All of a JSON value that is no object and no array."""
    open_values = [value]
    while open_values:
        part = open_values.pop()
        if isinstance(part, dict | list):
            open_values += part.values() if isinstance(part, dict) else part
        else:
            yield part


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
