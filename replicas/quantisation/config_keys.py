"""Keys of a quantization_config, taken one by one: what is not understood is refused, by its name. No torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from replicas.model_support import UnsupportedModel

FIX = "serve another quantisation of the model, or its unquantised checkpoint with model.quantise"
_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")


class ConfigKeys:
    """A mapping in a config.json, and where it is. Every key must be taken, or be known to be without effect."""

    def __init__(self, said: object, where: str) -> None:
        """Raises UnsupportedModel for what is no mapping."""
        self.where = where
        if not isinstance(said, Mapping):
            raise UnsupportedModel(f"{where}: {said!r} is no JSON object; {FIX}")
        self._left: dict[str, Any] = dict(said)

    def take(self, name: str, otherwise: Any = None) -> Any:
        """Its value, `otherwise` where it is left out or null."""
        value = self._left.pop(name, None)
        return otherwise if value is None else value

    def take_one(self, name: str, expected: Collection[Any], otherwise: Any = None) -> Any:
        """Its value. Raises UnsupportedModel unless it is one of these."""
        value = self.take(name, otherwise)
        if isinstance(value, bool) != any(isinstance(one, bool) for one in expected) or value not in expected:
            raise self.refusal(name, value, " or ".join(_json(one) for one in expected))
        return value

    def take_group_size(self) -> int:
        """Of `group_size`; -1 for whole rows."""
        size = self.take("group_size")
        if not isinstance(size, int) or isinstance(size, bool) or (size != -1 and (size < 32 or size % 32)):
            raise self.refusal("group_size", size, "-1 or a multiple of 32")
        return size

    def take_names(self, name: str) -> tuple[str, ...]:
        """Names of modules."""
        names = self.take(name, [])
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise self.refusal(name, names, "a list of names")
        return tuple(names)

    def refuse_rest(self, harmless: Collection[str] = ()) -> None:
        """Raises UnsupportedModel for a key that was not taken, says something and is not harmless."""
        for name, value in self._left.items():
            if name not in harmless and not any(value is one or value == one for one in _NOTHING):
                raise self.refusal(name, value, "nothing")

    def refusal(self, name: str, value: object, expected: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.where}.{name}: {_json(value)} is not supported, expected {expected}; {FIX}")


def _json(value: object) -> str:
    return json.dumps(value, default=str) if isinstance(value, bool | list | dict) or value is None else repr(value)
