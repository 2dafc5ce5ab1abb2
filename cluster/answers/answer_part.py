"""What an answer is made of, piece by piece: reasoning, content, and calls of tools."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class PartKind(Enum):
    """CALL begins a call, ARGUMENTS go on with it."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    ARGUMENTS = auto()


class AnswerPart(NamedTuple):
    """A piece of an answer.

    text: of a CALL the function's name; of ARGUMENTS a piece of JSON. call: which one they belong to, from 0.
    """

    kind: PartKind
    text: str
    call: int = 0


def joined(parts: list[AnswerPart]) -> list[AnswerPart]:
    """The same with neighbours of one kind as one."""
    result: list[AnswerPart] = []
    for part in parts:
        if result and part.kind is not PartKind.CALL and result[-1].kind is part.kind and result[-1].call == part.call:
            result[-1] = part._replace(text=result[-1].text + part.text)
        elif part.text:
            result.append(part)
    return result
