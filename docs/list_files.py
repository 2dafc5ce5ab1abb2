"""Prints every file in one line, by the first sentence of its docstring: `python docs/list_files.py`."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def list_files() -> str:
    """The whole document."""
    parts = [
        "# Files",
        "From the top floor to the bottom one: a folder imports only from folders behind it. Also: "
        "`cluster/http/haproxy.sh`, what Serve starts as HAProxy.",
    ]
    for top in ("cluster", "replicas", "scheduler"):
        for folder in [ROOT / top / name for name in _floors(top)]:
            parts += [_described(inner.parent) for inner in sorted(folder.glob("**/__init__.py"))]
        parts.append(_described(ROOT / top))
    return "\n\n".join(parts) + "\n"


def _floors(top: str) -> list[str]:
    """Folders from the top floor down, as the contracts on imports have them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = [layer for found in contracts if found.get("containers") == [top] for layer in found["layers"]]
    names = [name for layer in layers for name in re.split(r" [|:] ", layer)]
    return [name for name in names if (ROOT / top / name).is_dir()]


def _described(folder: Path) -> str:
    lines = [f"- `{file.stem}` {_first_sentence(file)}" for file in sorted(folder.glob("*.py")) if file.stem[0] != "_"]
    title = f"## {folder.relative_to(ROOT)}/"
    return "\n".join([title, "", _first_sentence(folder / "__init__.py"), "", *lines])


def _first_sentence(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = re.split(r"(?<=[.!?])\s", text.replace("\n", " "), maxsplit=1)[0]
    return first.strip()


if __name__ == "__main__":
    sys.stdout.write(list_files())
