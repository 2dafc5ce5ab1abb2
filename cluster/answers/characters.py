"""Reading character by character: coroutines that are sent one after the other, which all readers are made of."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
Reading: TypeAlias = Generator[None, str, Result]

SPACE = " \t\r\n"


class MalformedCall(Exception):
    """The text is no call, or goes on after one. rest: what was read last, which may begin something else."""

    def __init__(self, rest: str) -> None:
        super().__init__(rest)
        self.rest = rest


def skip_space() -> Reading[str]:
    while True:
        ch = yield
        if ch not in SPACE:
            return ch


def literal(expected: str, read: str = "") -> Reading[None]:
    """read: what has been read of it, or in place of it."""
    if not expected.startswith(read):
        raise MalformedCall(read)
    for index in range(len(read), len(expected)):
        ch = yield
        if ch != expected[index]:
            raise MalformedCall(expected[:index] + ch)


def until(end: str) -> Reading[str]:
    """The text up to an end, which is read too."""
    pieces: list[str] = []
    while True:
        ch = yield
        pieces.append(ch)
        if ch == end[-1] and "".join(pieces[-len(end) :]) == end:
            return "".join(pieces)[: -len(end)]
