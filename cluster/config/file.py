"""Loading a config file, and reporting everything that is wrong with it at once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cluster.config.key_tree import KeyTree
from cluster.config.key_tree import Path as KeyPath
from cluster.config.problems import Problem, explain_errors, show
from cluster.config.root import CONFLICT_ERROR_TYPE, Config
from cluster.config.section import Section
from cluster.config.yaml_document import YamlDocument, YamlError, parse_yaml
from cluster.user_error import ConfigError

SectionT = TypeVar("SectionT", bound=Section)


def load_config(path: str | Path, overrides: Mapping[str, object] | None = None) -> Config:
    """The config in a YAML file, with values replaced by dotted key ("server.port") for the command line.

    Reads the file, and looks whether files and packages that it names are on this machine. Raises ConfigError
    with one line for each thing that is wrong.
    """
    return _load(Path(path), overrides or {}, is_elsewhere=False)[1]


def load_for_elsewhere(path: str | Path) -> tuple[dict[str, Any], Config]:
    """A YAML file's values as they are written, and the config. What it names is on other machines: not looked for.

    Raises ConfigError with one line for each thing that is wrong.
    """
    return _load(Path(path), {}, is_elsewhere=True)


def config_of(values: Mapping[str, Any]) -> Config:
    """The config of a mapping; files are not looked for. Raises ConfigError with one line for each wrong thing."""
    config, problems = _validate(dict(values), None)
    return _or_raise(config, problems)


def config_of_values(values: Mapping[str, Any], overrides: Mapping[str, object]) -> Config:
    """The config of a mapping that the command line has made, with values replaced by dotted key. Files are looked for,
    relative paths from the working folder. Raises ConfigError with one line for each wrong thing.
    """
    config, problems = _validate(_with_overrides(dict(values), overrides), Path.cwd())
    return _or_raise(config, problems, "command line: ")


def section_of(kind: type[SectionT], values: Mapping[str, Any], where: str = "") -> SectionT:
    """A part of the config by itself. where: dotted place of its keys in the whole. Raises ConfigError likewise."""
    return _or_raise(*_problems_with(kind, values), where)


def _or_raise(section: SectionT | None, problems: list[Problem], where: str = "") -> SectionT:
    if section is None:
        raise ConfigError(*(f"{where}{'.'.join(problem.path)}: {problem.text}" for problem in problems))
    return section


def _load(file: Path, overrides: Mapping[str, object], is_elsewhere: bool) -> tuple[dict[str, Any], Config]:
    document = _read(file)
    values = _with_overrides(document.values, overrides)
    config, problems = _validate(values, None if is_elsewhere else file.resolve().parent)
    lines = _report(file, document, problems, overrides)
    if config is None or lines:
        raise ConfigError(*lines)
    return values, config


def _read(file: Path) -> YamlDocument:
    try:
        text = file.read_bytes().decode("utf-8-sig")
        document = parse_yaml(text)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{file}: is a folder, expected a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}") from None
    except YamlError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    if document.values is None:
        raise ConfigError(f"{file}: is empty; see configs/local.yaml for all keys")
    if not isinstance(document.values, dict):
        raise ConfigError(f"{file}: expected keys at the top level, found {show(document.values)}")
    return document


def _with_overrides(values: object, overrides: Mapping[str, object]) -> dict[Any, Any]:
    assert isinstance(values, dict)
    changed: dict[Any, Any] = copy.deepcopy(values)
    for dotted, value in overrides.items():
        *sections, name = dotted.split(".")
        place: Any = changed
        for section in sections:
            if isinstance(place, dict) and place.get(section) is None:
                place[section] = {}  # a section that was null becomes one
            place = place[section] if isinstance(place, dict) else None
        # A section that is no mapping is reported by validation, as it would be without the override.
        if isinstance(place, dict):
            place[name] = value
    return changed


def _validate(values: dict[Any, Any], base_dir: Path | None) -> tuple[Config | None, list[Problem]]:
    """The config, or everything that is wrong. Conflicts between the values that are right are found too.

    base_dir: folder from which relative paths count; None: files are not looked for.
    """
    config, problems = _problems_with(Config, values, base_dir)
    doubtful = {path for problem in problems for path in problem.doubtful}
    if doubtful:
        # Conflicts were not looked for, as they need valid values: leave out what is wrong and try again.
        try:
            rest = _without(values, (problem.path for problem in problems))
            Config.model_validate(rest, context={"base_dir": base_dir})
        except ValidationError as error:
            conflicts = (found for found in error.errors(include_url=False) if _is_certain(found, doubtful))
            problems += explain_errors(conflicts, KeyTree(Config.model_json_schema()))
    return config, problems


def _problems_with(
    kind: type[SectionT], values: Mapping[Any, Any], base_dir: Path | None = None
) -> tuple[SectionT | None, list[Problem]]:
    """A section of the config, or what is wrong with it by itself."""
    try:
        return kind.model_validate(values, context={"base_dir": base_dir}), []
    except ValidationError as error:
        return None, explain_errors(error.errors(include_url=False), KeyTree(kind.model_json_schema()))


def _is_certain(error: ErrorDetails, doubtful: Iterable[KeyPath]) -> bool:
    """Whether this is a conflict between keys none of which is in doubt."""
    if error["type"] != CONFLICT_ERROR_TYPE:
        return False
    reads = [tuple(read.split(".")) for read in error["ctx"]["reads"]]
    return not any(read[: len(path)] == path[: len(read)] for path in doubtful for read in reads)


def _without(values: dict[Any, Any], paths: Iterable[KeyPath]) -> dict[Any, Any]:
    rest: dict[Any, Any] = copy.deepcopy(values)
    for path in paths:
        place: Any = rest
        for part in path[:-1]:
            place = place.get(part) if isinstance(place, dict) else None
        if isinstance(place, dict):
            for key in [key for key in place if str(key) == path[-1]]:
                del place[key]
    return rest


def _report(file: Path, document: YamlDocument, problems: list[Problem], overrides: Mapping[str, object]) -> list[str]:
    """The problems as lines, in the order of the file."""
    numbered: list[tuple[int, str]] = []
    for repeated in document.repeated:
        text = f"given twice, on lines {repeated.first_line} and {repeated.second_line}"
        numbered.append((repeated.second_line, f"{file}: {'.'.join(repeated.path)}: {text}"))
    for problem in problems:
        key = ".".join(problem.path)
        if _is_of_command_line(problem.path, document, overrides):
            numbered.append((0, f"command line: {key}: {problem.text}"))
            continue
        line = _line_of(problem.path, document)
        place = f" (line {line})" if line else ""
        numbered.append((line, f"{file}: {key}: {problem.text}{place}"))
    return [text for _, text in sorted(numbered, key=lambda entry: entry[0])]


def _is_of_command_line(path: KeyPath, document: YamlDocument, overrides: Mapping[str, object]) -> bool:
    """The key or one above it was given there; or one under it, and the file has none of that name."""
    key = ".".join(path)
    if any(f"{key}.".startswith(f"{given}.") for given in overrides):
        return True
    return path not in document.lines and any(given.startswith(f"{key}.") for given in overrides)


def _line_of(path: KeyPath, document: YamlDocument) -> int:
    """Line of the key, or of the nearest key above it; 0 when there is none."""
    for end in range(len(path), 0, -1):
        if path[:end] in document.lines:
            return document.lines[path[:end]]
    return 0
