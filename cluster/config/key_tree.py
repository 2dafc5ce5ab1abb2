"""The keys a config may have: what each allows, and which one a wrong key was meant to be."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Path = tuple[str, ...]
_KIND_NAMES = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}


def either(words: Iterable[str]) -> str:
    """ "a, b or c"; empty for no words."""
    *others, last = [*words] or [""]
    return f"{', '.join(others)} or {last}" if others else last


class KeyTree:
    """All keys, from the JSON schema of the config's models. Immutable."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._definitions: Mapping[str, Any] = schema.get("$defs", {})
        self._schemas: dict[Path, Mapping[str, Any]] = dict(self._walk((), schema))

    def __contains__(self, path: Path) -> bool:
        return path in self._schemas

    def __iter__(self) -> Iterator[Path]:
        return iter(self._schemas)

    def is_section(self, path: Path) -> bool:
        return "properties" in self._alternatives(self._schemas[path])[0]

    def keys_under(self, path: Path) -> list[str]:
        return [known[-1] for known in self._schemas if known[:-1] == path and known]

    def description(self, path: Path) -> str:
        return str(self._schemas[path].get("description", ""))

    def expected(self, path: Path) -> str:
        """What the key allows, in words: "a whole number from 1 to 65535"."""
        alternatives = self._alternatives(self._schemas[path])
        return either(dict.fromkeys(_describe(alternative) for alternative in alternatives))

    def choices(self, path: Path) -> list[str]:
        """The values of a key that allows only some texts; empty for any other."""
        found = [value for schema in self._alternatives(self._schemas[path]) for value in _values(schema)]
        return [value for value in found if isinstance(value, str)]

    def meant(self, path: Path) -> list[Path]:
        """The known keys that an unknown key most probably stands for; empty when none is like it.

        A key that is right but in the wrong place counts more than a similar one in the same place.
        """
        parent, name = path[:-1], path[-1]
        elsewhere = [known for known in self._schemas if known and known[-1] == name]
        if elsewhere:
            return elsewhere
        beside = difflib.get_close_matches(name, self.keys_under(parent), n=1, cutoff=0.6)
        if beside:
            return [(*parent, beside[0])]
        names = {known[-1] for known in self._schemas if known}
        close = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.75)
        return [known for known in self._schemas if known and known[-1] in close]

    def _walk(self, path: Path, schema: Mapping[str, Any]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
        yield path, schema
        for alternative in self._alternatives(schema):
            for name, child in alternative.get("properties", {}).items():
                yield from self._walk((*path, name), child)

    def _alternatives(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        if "anyOf" in schema:
            return [found for alternative in schema["anyOf"] for found in self._alternatives(alternative)]
        if "$ref" in schema:
            definition: Mapping[str, Any] = self._definitions[schema["$ref"].rsplit("/", 1)[-1]]
            return [definition]
        return [schema]


def _values(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))


def _describe(schema: Mapping[str, Any]) -> str:
    if "properties" in schema:
        return f"keys under it: {', '.join(schema['properties'])}"
    if values := _values(schema):
        return either(json.dumps(value) for value in values)
    kind = schema.get("type")
    if kind == "null":
        return "null"
    if kind == "string" and schema.get("format") == "path":
        return "a path"
    return _KIND_NAMES.get(str(kind), "a value") + _describe_bounds(schema)


def _describe_bounds(schema: Mapping[str, Any]) -> str:
    least, most, above = (schema.get(bound) for bound in ("minimum", "maximum", "exclusiveMinimum"))
    if "minLength" in schema or "maxLength" in schema:
        most_chars = f" of at most {schema['maxLength']} characters" if "maxLength" in schema else ""
        return f"{most_chars}, not empty" if schema.get("minLength") else most_chars
    if above is not None:
        return f" above {above:g}" + (f" and at most {most:g}" if most is not None else "")
    if least is not None and most is not None:
        return f" from {least} to {most}"
    return f" of at least {least}" if least is not None else ""
