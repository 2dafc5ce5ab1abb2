"""What happened in one simulation, line by line: written only if somebody wants to read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Trace:
    """Keeps what is told it, and makes lines of it when it is read. now_s: of the simulation."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s, self._start_s = now_s, now_s()
        self._told: list[tuple[float, str, str, tuple[Any, ...]]] = []

    def __call__(self, who: str, text: str, *values: Any) -> None:
        """Somebody did this. text: with a %s for each value."""
        self._told.append((self._now_s() - self._start_s, who, text, values))

    def __len__(self) -> int:
        return len(self._told)

    def lines(self) -> list[str]:
        """In order: seconds since the start, who, what."""
        return [f"{at_s:8.4f}  {who:<12} {text % values}" for at_s, who, text, values in self._told]
