"""A figure beside the most that it may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.load.tables import table


@dataclass(frozen=True, slots=True)
class Figure:
    """most: None where nothing is asked of it. compared: what it was computed from, for people."""

    name: str
    value: float
    unit: str
    most: float | None = None
    compared: str = ""

    @property
    def is_missed(self) -> bool:
        return self.most is not None and not self.value <= self.most


def as_table(figures: Sequence[Figure]) -> str:
    """For people."""
    rows = [
        [
            figure.name,
            f"{figure.value:.3g} {figure.unit}",
            "-" if figure.most is None else f"{figure.most:g}",
            "" if figure.most is None else "missed" if figure.is_missed else "reached",
            figure.compared,
        ]
        for figure in figures
    ]
    return table(["", "measured", "at most", "", "of"], rows)
