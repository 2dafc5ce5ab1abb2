"""Makes schemas.json: 200 JSON Schemas as clients write them, which a small model can follow to an end.

    python -m tests.golden.make_schemas

Strings and arrays are bounded: a small model that may write on often does.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

NUM_SCHEMAS = 200
FILE = Path(__file__).parent / "schemas.json"
_NAMES = (
    *("name", "city", "country", "age", "count", "kind", "tags", "price", "active", "date", "owner", "items", "note"),
    *("größe", "x-y", "first name", "id", "email", "level", "parts"),
)
_WORDS = ("red", "green", "blue", "small", "large", "open", "closed", "käse", "日本", 'a"b', "back\\slash")
_FORMATS = ("date", "time", "date-time", "ipv4", "uuid")
_PATTERNS = ("^[A-Z][a-z]{2,6}$", "^[0-9]{3}-[0-9]{4}$", "^(yes|no|perhaps)$", "[aeiou]{2}", "^#[0-9a-f]{6}$")
_MOST_LEVELS = 3


def make_schemas(seed: int = 20_261_129) -> list[dict[str, Any]]:
    """Pure."""
    return [_Maker(random.Random(f"{seed} {number}")).schema() for number in range(NUM_SCHEMAS)]


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._definitions: dict[str, Any] = {}

    def schema(self) -> dict[str, Any]:
        schema = self._object(1) if self._rng.random() < 0.8 else self._any(1)
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _any(self, level: int) -> dict[str, Any]:
        flat = (self._enum, self._const, self._boolean, self._integer, self._string, self._pattern, self._format,
                self._nullable, self._union)  # fmt: skip
        nested = (self._object, self._array, self._tuple, self._reference, self._tagged, self._merged)
        if level < _MOST_LEVELS and self._rng.random() < 0.3:
            return self._rng.choice(nested)(level + 1)
        return self._rng.choice(flat)()

    def _enum(self) -> dict[str, Any]:
        return {"enum": self._rng.sample([*_WORDS, 1, 2.5, None, True], self._rng.randint(2, 5))}

    def _const(self) -> dict[str, Any]:
        return {"const": self._rng.choice([*_WORDS, 7, {"a": [1, None]}])}

    def _boolean(self) -> dict[str, Any]:
        return {"type": "boolean"}

    def _integer(self) -> dict[str, Any]:
        least = self._rng.randint(-50, 50)
        bounds = {"minimum": least, "maximum": least + self._rng.randint(1, 10**4)}
        return {"type": "integer", **bounds} | ({"multipleOf": 5} if self._rng.random() < 0.2 else {})

    def _string(self) -> dict[str, Any]:
        most = self._rng.randint(3, 20)
        return {"type": "string", "maxLength": most} | ({"minLength": 2} if self._rng.random() < 0.3 else {})

    def _pattern(self) -> dict[str, Any]:
        return {"type": "string", "pattern": self._rng.choice(_PATTERNS), "maxLength": 16}

    def _format(self) -> dict[str, Any]:
        name = self._rng.choice(_FORMATS)
        return {"type": "string", "format": name} | ({"maxLength": 25} if name in ("time", "date-time") else {})

    def _nullable(self) -> dict[str, Any]:
        return {"anyOf": [self._rng.choice((self._string, self._integer, self._enum))(), {"type": "null"}]}

    def _union(self) -> dict[str, Any]:
        return {"type": ["integer", "string"], "minimum": 0, "maximum": 99, "maxLength": 5}

    def _object(self, level: int) -> dict[str, Any]:
        names = self._rng.sample(_NAMES, self._rng.randint(1, 5 - level))
        required = [name for name in names if self._rng.random() < 0.8]
        return {
            "type": "object",
            "properties": {name: self._any(level) for name in names},
            "required": required,
            "additionalProperties": False,
        }

    def _array(self, level: int) -> dict[str, Any]:
        return {"type": "array", "items": self._any(level), "minItems": self._rng.randint(0, 1), "maxItems": 3}

    def _tuple(self, level: int) -> dict[str, Any]:
        return {"type": "array", "prefixItems": [self._any(level), self._any(level)], "items": False, "minItems": 2}

    def _reference(self, level: int) -> dict[str, Any]:
        name = f"d{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._any(level)
        return {"$ref": f"#/$defs/{name}"}

    def _tagged(self, level: int) -> dict[str, Any]:
        """As pydantic writes a union with a discriminator."""
        parts = [
            {
                "type": "object",
                "properties": {"type": {"const": tag}, "value": self._any(level)},
                "required": ["type", "value"],
                "additionalProperties": False,
            }
            for tag in self._rng.sample(_WORDS[:6], 2)
        ]
        return {"oneOf": parts}

    def _merged(self, level: int) -> dict[str, Any]:
        return {"allOf": [{"type": "integer", "minimum": self._rng.randint(0, 9)}, {"maximum": 10 + level}]}


if __name__ == "__main__":
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, make_schemas())) + "\n]\n")
