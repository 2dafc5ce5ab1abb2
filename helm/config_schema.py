"""`python helm/config_schema.py` writes what the SplitServe config may hold into values.schema.json.

So Helm refuses a misspelt key or a text for a number before anything is installed. What goes together with what only
`splitserve check` knows. (A null that takes a default of the chart away is gone before Helm looks at the schema.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.config.root import Config

_FILE = Path(__file__).with_name("values.schema.json")
_REFERENCE = "#/$defs/"
_OF_CONFIG = "config."  # how definitions of ours begin, beside the chart's own
# What the chart's own defaults give: without them it has nothing to deploy.
_ALWAYS_THERE = ["pools", "server", "ingress"]


def with_config(chart: Mapping[str, Any]) -> dict[str, Any]:
    """The chart's schema with the config's in the place of what it had of it."""
    schema = Config.model_json_schema()
    sections = {_OF_CONFIG + name: _section(section) for name, section in schema.pop("$defs").items()}
    own = {name: value for name, value in chart["$defs"].items() if not name.startswith(_OF_CONFIG)}
    config = _section(schema) | {"required": _ALWAYS_THERE}
    return {**chart, "$defs": own | sections, "properties": {**chart["properties"], "config": config}}


def as_text(schema: Mapping[str, Any]) -> str:
    """As the file has it."""
    return json.dumps(schema, indent=2) + "\n"


def _section(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = {name: _in_one_piece(_renamed(value)) for name, value in schema["properties"].items()}
    section = {**schema, "description": re.sub(r"\s+", " ", schema["description"]), "properties": properties}
    del section["title"]
    return section


def _renamed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """References lead to our definitions. Left out: titles (they repeat keys), a format of pydantic's own."""
    renamed: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref":
            renamed[key] = f"{_REFERENCE}{_OF_CONFIG}{value.removeprefix(_REFERENCE)}"
        elif isinstance(value, dict):
            renamed[key] = _renamed(value)
        elif key == "anyOf":
            renamed[key] = [_renamed(choice) for choice in value]
        elif key != "title" and (key, value) != ("format", "path"):
            renamed[key] = value
    return renamed


def _in_one_piece(schema: dict[str, Any]) -> dict[str, Any]:
    """A value that may be null, without a choice of two schemas: Helm would say of each what does not fit it."""
    choices = [choice for choice in schema.get("anyOf", ()) if "type" in choice and choice != {"type": "null"}]
    if len(choices) != 1 or len(schema["anyOf"]) != 2:
        return schema
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return rest | choices[0] | {"type": [choices[0]["type"], "null"]}


if __name__ == "__main__":
    _FILE.write_text(as_text(with_config(json.loads(_FILE.read_text(encoding="utf-8")))), encoding="utf-8")
