"""YAML text as plain values, with the line of every key and the keys that are given twice."""

from __future__ import annotations

from dataclasses import dataclass, field

import yaml

# No key of a config lies deeper; a bound also ends documents that contain themselves.
_MAX_DEPTH = 4


class YamlError(Exception):
    """Text that is not one YAML document. The message names line and column."""


@dataclass(frozen=True, slots=True)
class RepeatedKey:
    path: tuple[str, ...]
    first_line: int
    second_line: int


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """values is None for an empty document. Of a repeated key the last value counts, as in PyYAML."""

    values: object
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)
    repeated: list[RepeatedKey] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    """Safe, and without dates: 2026-01-01 is text, and an impossible date is no crash."""


_Loader.yaml_implicit_resolvers = {
    first_char: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first_char, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str) -> YamlDocument:
    """Raises YamlError. Never makes anything but plain values (safe loader)."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return YamlDocument(None)
        document = YamlDocument(None)
        _record_keys(node, (), document)
        return YamlDocument(loader.construct_document(node), document.lines, document.repeated)
    except yaml.MarkedYAMLError as error:
        raise YamlError(_describe(error)) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"line {line}: character {error.character!r} is not allowed in YAML") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlError(f"cannot be read: {error}") from error


def _describe(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = error.problem or error.context or "not valid"
    hint = " (indent with spaces, not tabs)" if "'\\t'" in problem else ""
    return f"{place}{problem}{hint}"


def _record_keys(node: yaml.Node, path: tuple[str, ...], document: YamlDocument) -> None:
    """Notes lines and repeated keys of a mapping and of the mappings in it. Mutates the document's lists."""
    if not isinstance(node, yaml.MappingNode) or len(path) >= _MAX_DEPTH:
        return
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            continue
        key, line = key_node.value, key_node.start_mark.line + 1
        if key in seen:
            document.repeated.append(RepeatedKey((*path, key), seen[key], line))
        seen[key] = line
        document.lines[(*path, key)] = line
        _record_keys(value_node, (*path, key), document)
