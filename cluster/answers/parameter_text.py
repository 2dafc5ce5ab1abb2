"""How the value of a parameter in tags is written, by its schema: as it stands, where it may be a string, else as JSON.

Who reads calls and who says what they may be must agree on that. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_OF_TYPES = ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (list, "array"), (dict, "object"))
_MOST_BRANCHES = 256
# What else a schema may ask of a string.
_ASKS_MORE = ("pattern", "format", "minLength", "maxLength", "allOf", "not", "if")


def is_text(schema: Any, root: Any) -> bool:
    """Whether its text is a string as it stands. root: what its references are in."""
    types = [_types_of(branch) for branch in _branches(schema, root)]
    return not all(types) or any("string" in each for each in types)


def texts_of(schema: Any, root: Any) -> list[str] | None:
    """Of one that `is_text`: the only strings that it may be; None: there are others."""
    found: list[str] = []
    for branch in _branches(schema, root):
        values = [branch["const"]] if "const" in branch else branch.get("enum")
        if isinstance(values, list):
            found += [value for value in values if isinstance(value, str)]
        elif "string" in (types := _types_of(branch)) or not types:
            return None
    return list(dict.fromkeys(found))


def what_else_is_asked(schema: Any, root: Any) -> str | None:
    """Of one that `is_text` and may be any string: a keyword by which it may not."""
    asked = [name for branch in _branches(schema, root) for name in _ASKS_MORE if name in branch]
    return asked[0] if asked else None


def _branches(schema: Any, root: Any) -> Iterator[Mapping[str, Any]]:
    """The schemas of which it must follow one, without references; what stands beside them is left aside."""
    open_schemas, num_seen = [schema], 0
    while open_schemas and num_seen < _MOST_BRANCHES:
        part = open_schemas.pop()
        num_seen += 1
        if not isinstance(part, Mapping):
            yield {}
        elif isinstance(reference := part.get("$ref"), str):
            open_schemas.append(_referred(reference, root))
        elif isinstance(several := part.get("anyOf", part.get("oneOf")), list) and several:
            open_schemas += several
        else:
            yield part


def _referred(reference: str, root: Any) -> Any:
    found = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    """Names of types that it allows; empty: it does not say."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return set()
    return {next((name for kind, name in _OF_TYPES if isinstance(value, kind)), "null") for value in values}
