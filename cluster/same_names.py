"""Frozen dataclasses made of models that call the same things by the same names: nothing is copied by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel

from replicas.settings import is_configured

_T = TypeVar("_T")


def by_names(kind: type[_T], *sources: BaseModel, **given: Any) -> _T:
    """An instance of a dataclass whose every field is given, or is what the one source with a field of that name has.
    If that is a model too, and the field a dataclass, it is made likewise. Paths become texts, lists tuples, mappings
    tuples of pairs.

    A default does not count: raises TypeError, naming the field, for one that no source has (unless it is marked as
    `unconfigured`), that several have, or that is given and does not exist. Pure.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # of a dataclass
    if unknown := given.keys() - {field.name for field in fields}:
        raise TypeError(f"{kind.__name__} has no field {', '.join(sorted(unknown))}")
    values = dict(given)
    for field in fields:
        if field.name in given:
            continue
        having = [source for source in sources if field.name in type(source).model_fields]
        if len(having) != is_configured(field):
            known = "in several of" if len(having) > 1 else "unconfigured, but in" if having else "in none of"
            names = ", ".join(type(source).__name__ for source in having or sources)
            raise TypeError(f"{kind.__name__}.{field.name} is {known} {names}")
        if having:
            values[field.name] = _plain(getattr(having[0], field.name), kind, field.name)
    return kind(**values)


def _plain(value: Any, kind: type, name: str) -> Any:
    if isinstance(value, BaseModel):
        return by_names(get_type_hints(kind)[name], value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list):
        return tuple(value)
    return tuple(value.items()) if isinstance(value, dict) else value
