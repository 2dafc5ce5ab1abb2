"""Pydantic's errors as one line each, in the words of a person who edits a YAML file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic_core import ErrorDetails

from cluster.config.key_tree import KeyTree, Path, either
from cluster.config.root import CONFLICT_ERROR_TYPE

_MAX_SHOWN_CHARS = 60
# Follow-on errors: what caused them is reported too.
_IGNORED_TYPES = {"default_factory_not_called"}
_REASONS = {
    "greater_than": "is too small",
    "greater_than_equal": "is too small",
    "less_than": "is too large",
    "less_than_equal": "is too large",
    "literal_error": "is not allowed",
    "finite_number": "is not finite",
    "string_too_short": "is empty",
    "string_too_long": "is too long",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """path: the key in error. doubtful: keys whose value is unknown because of it, so nothing follows from them."""

    path: Path
    text: str
    doubtful: tuple[Path, ...]


def explain_errors(errors: Iterable[ErrorDetails], tree: KeyTree) -> list[Problem]:
    """One problem an error, without those that only follow from another of them."""
    found = [(error["type"], explain(error, tree)) for error in errors if error["type"] not in _IGNORED_TYPES]
    doubtful = {path for kind, problem in found if kind != "missing" for path in problem.doubtful}
    return [problem for kind, problem in found if not (kind == "missing" and problem.path in doubtful)]


def explain(error: ErrorDetails, tree: KeyTree) -> Problem:
    path = tuple(str(part) for part in error["loc"])
    kind, value = error["type"], error["input"]
    if kind == CONFLICT_ERROR_TYPE:
        return Problem(path, error["msg"], ())
    if kind == "extra_forbidden":
        meant = tree.meant(path)
        return Problem(path, _unknown_key(path, meant, tree), (path, *meant))
    if kind == "invalid_key":
        return Problem(path, f"a key must be text, {show(value)} is {_kind_of(value)}", (path,))
    if kind == "missing":
        return Problem(path, f"missing; expected {tree.expected(path)}", (path,))
    if kind == "value_error":
        reason = str(error.get("ctx", {}).get("error", error["msg"]))
        return Problem(path, f"{show(value)} {reason}", (path,))
    return Problem(path, _wrong_value(path, kind, value, tree), (path,))


def show(value: object) -> str:
    """A value as one would write it in YAML, cut when long."""
    if isinstance(value, dict):
        return "a group of keys"
    if isinstance(value, (list, tuple, set)):
        return "a list"
    if isinstance(value, (str, bool)) or value is None:
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= _MAX_SHOWN_CHARS else f'{text[: _MAX_SHOWN_CHARS - 4]}..."'
    return str(value)


def _wrong_value(path: Path, kind: str, value: object, tree: KeyTree) -> str:
    expected = tree.expected(path) if path in tree else "another value"
    if value is None:
        return f"has no value; expected {expected}"
    close = difflib.get_close_matches(str(value), tree.choices(path) if path in tree else [], n=1, cutoff=0.5)
    if kind == "literal_error" and close:
        return f'{show(value)} is not allowed; did you mean "{close[0]}"? Expected {expected}'
    reason = _REASONS.get(kind) or _mismatch(value, expected)
    return f"{show(value)} {reason}; expected {expected}"


def _mismatch(value: object, expected: str) -> str:
    if isinstance(value, (dict, list)):
        return "is not allowed here"
    if isinstance(value, str) and "number" in expected and _is_number(value):
        return "is text: write the number without quotes, and with digits only"
    if not isinstance(value, str) and expected.startswith("text"):
        return f"is {_kind_of(value)}: put it in quotes"
    if isinstance(value, float) and "whole number" in expected:
        return "has a fraction"
    return f"is {_kind_of(value)}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "a truth value"
    names = {str: "text", int: "a number", float: "a number", dict: "a group of keys", list: "a list"}
    return "no value" if value is None else names.get(type(value), type(value).__name__)


def _unknown_key(path: Path, meant: list[Path], tree: KeyTree) -> str:
    if not meant:
        known = tree.keys_under(path[:-1])
        return f"unknown key; the keys here are {', '.join(known)}"
    if meant[0][:-1] == path[:-1]:
        return f'unknown key; did you mean "{meant[0][-1]}"?'
    if meant[0][-1] == path[-1]:
        places = [".".join(place[:-1]) or "the top level" for place in meant]
        return f'unknown key here; "{path[-1]}" belongs under {either(places)}'
    return f"unknown key; did you mean {either('.'.join(place) for place in meant)}?"
