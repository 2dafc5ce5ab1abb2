"""What README.md and the other documents offer to be typed: commands, programs and settings, block by block."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "helm/README.md",
]
_FENCE = "```"
_INDENT = "    "
_LIST_ITEM = re.compile(r"\s*([-*]|\d+\.) ")
_OPERATORS = {"&&", "||", "|", ";", "&", ">"}


@dataclass(frozen=True, slots=True)
class Block:
    """language: of its fence, "" for a block that is indented. line: number of its first one."""

    file: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"

    @property
    def settings(self) -> dict[str, object] | None:
        """What it says in YAML; None if it is no such block."""
        try:
            values = yaml.safe_load(self.text)
        except yaml.YAMLError:
            return None
        return values if isinstance(values, dict) and self.language in ("", "yaml") else None


@dataclass(frozen=True, slots=True)
class Command:
    """One program and its arguments. text: the same, for tables; place: where it is offered."""

    place: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)


def blocks(file: Path) -> list[Block]:
    found: list[Block] = []
    lines = [*file.read_text(encoding="utf-8").splitlines(), ""]
    begun: int | None = None  # index of the first line of the block that is being read
    language, is_in_list = "", False
    for index, line in enumerate(lines):
        if language:  # in a fence
            if line.startswith(_FENCE):
                found.append(_block(file, lines, begun or 0, index, language))
                begun, language = None, ""
        elif line.startswith(_FENCE):
            begun, language = index + 1, line.removeprefix(_FENCE).strip() or "text"
        elif begun is not None and not line.startswith(_INDENT):
            found.append(_block(file, lines, begun, index, ""))
            begun = None
        elif begun is None and line.startswith(_INDENT) and not lines[index - 1].strip() and not is_in_list:
            begun = index
        if line.strip() and begun is None:
            is_in_list = bool(_LIST_ITEM.match(line)) or (is_in_list and line.startswith(" "))
    return found


def _block(file: Path, lines: list[str], begun: int, ended: int, language: str) -> Block:
    text = "\n".join(line if language else line.removeprefix(_INDENT) for line in lines[begun:ended])
    return Block(file, begun + 1, language, text + "\n")


def commands(block: Block) -> Iterator[Command]:
    """Each program that a block of commands has run. Raises ValueError where its quotes do not end."""
    pending = ""
    for line in block.text.splitlines():
        pending += line + "\n"
        if line.endswith("\\"):
            continue
        try:
            words = _words(pending)
        except ValueError:
            continue  # a quote goes on
        yield from _commands(block.place, words)
        pending = ""
    if pending.strip():
        raise ValueError(f"{block.place}: no end of {pending!r}")


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="&|;>")
    lexer.whitespace_split = True
    return list(lexer)


def _commands(place: str, words: list[str]) -> Iterator[Command]:
    start = 0
    for index, word in enumerate([*words, ";"]):
        if word in _OPERATORS:
            if index > start and (start == 0 or words[start - 1] != ">"):  # what follows a > is a file
                yield Command(place, tuple(words[start:index]))
            start = index + 1
