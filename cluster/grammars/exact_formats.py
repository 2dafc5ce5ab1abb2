"""Formats of JSON Schema that what compiles only follows nearly, as patterns that say exactly what they mean."""

from __future__ import annotations

from typing import Any

from cluster.grammars.source_bounds import schemas_in

_LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    r"(\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
# A year has a 29th of February or has not, and there are no leap seconds: most readers of times know none either.
_PATTERNS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}


def with_exact_formats(schema: dict[str, Any]) -> None:
    """Mutates: a schema for strings with one of these formats gets a pattern beside what it has."""
    for part in schemas_in(schema):
        name = part.get("format")
        if not isinstance(name, str) or name not in _PATTERNS:
            continue
        pattern = f"^{_PATTERNS[name]}$".replace(r"\d", "[0-9]")
        del part["format"]
        if "pattern" not in part:
            part["pattern"] = pattern
        elif isinstance(part.get("allOf", []), list):
            part["allOf"] = [*part.get("allOf", []), {"pattern": pattern}]
