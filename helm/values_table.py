"""`python helm/values_table.py` writes the table of values in README.md from the comments of values.yaml.

A comment that begins with "# --" describes the key below it; "# @default -- text" replaces the default that is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_CHART = Path(__file__).parent
_BEGIN, _END = "<!-- values: made by values_table.py -->", "<!-- end of values -->"
_KEY = re.compile(r"( *)([A-Za-z][\w.-]*):")


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    default: str
    description: str


def described_keys(text: str) -> Iterator[Row]:
    """Every key of a values.yaml that has a description, in order."""
    values = yaml.safe_load(text)
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            begins = stripped.startswith("# --")
            if begins or comment:
                comment = ([] if begins else comment) + [stripped.removeprefix("# --").removeprefix("#").strip()]
            continue
        key = _KEY.match(line)
        if key:
            path = [*path[: len(key[1]) // 2], key[2]]
            if comment:
                yield _row(path, comment, values)
        comment = []


def _row(path: list[str], comment: list[str], values: Any) -> Row:
    for part in path:
        values = values[part]
    texts = [line for line in comment if not line.startswith("@default")]
    stated = [line.removeprefix("@default --").strip() for line in comment if line.startswith("@default")]
    return Row(".".join(path), stated[0] if stated else f"`{json.dumps(values)}`", " ".join(texts))


def table(text: str) -> str:
    """Markdown."""
    lines = ["| value | default | what it is |", "|---|---|---|"]
    lines += [
        f"| `{row.key}` | {row.default} | {row.description.replace('|', chr(92) + '|')} |"
        for row in described_keys(text)
    ]
    return "\n".join(lines)


def with_table(readme: str, values: str) -> str:
    """The README with the table of these values in its place."""
    before, rest = readme.split(_BEGIN)
    return f"{before}{_BEGIN}\n\n{table(values)}\n\n{_END}{rest.split(_END)[1]}"


if __name__ == "__main__":
    readme = _CHART / "README.md"
    readme.write_text(with_table(readme.read_text(), (_CHART / "values.yaml").read_text()))
