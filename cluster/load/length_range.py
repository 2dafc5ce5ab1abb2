"""Lengths of prompts and outputs, as a range."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths drawn evenly from low..high, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"lengths must be at least 1 and in order, not {self.low}:{self.high}")

    @staticmethod
    def parse(text: str) -> LengthRange:
        """ "128" or "64:256". Raises ValueError."""
        low, _, high = text.partition(":")
        return LengthRange(int(low), int(high or low))
