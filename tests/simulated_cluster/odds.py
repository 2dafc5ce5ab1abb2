"""How likely what is, in one simulation: drawn by its seed, none of it once the weather is calm."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Odds:
    """Chances of each thing, and mean times in seconds.

    Notes are what engines tell each other, reads the KV that they read, frames what decode sends a router, links the
    connections of routers to replicas, rows those of steps.
    """

    note_lost: float = 0.0
    note_twice: float = 0.0
    note_late: float = 0.0  # up to a second and a half; it is overtaken then
    note_garbled: float = 0.0
    note_s: float = 0.001
    read_fails: float = 0.0
    read_hangs: float = 0.0  # for seconds
    read_falsified: float = 0.0  # a cell of it; nobody could tell without digests
    read_s: float = 0.01
    frame_lost: float = 0.0
    frame_twice: float = 0.0
    frame_late: float = 0.0
    frame_garbled: float = 0.0
    channel_stuck: float = 0.0  # for seconds
    call_s: float = 0.001
    call_late: float = 0.0
    link_breaks: float = 0.0
    row_breaks: float = 0.0

    @staticmethod
    def calm() -> Odds:
        return Odds()

    @staticmethod
    def of(rng: random.Random, has_digests: bool) -> Odds:
        """One seed in six is calm; of the others each has some kinds of weather."""
        if rng.random() < 1 / 6:
            return Odds(read_s=rng.choice([0.002, 0.02, 0.2]))

        def some(rates: list[float]) -> float:
            return rng.choice([0.0, *rates])

        return Odds(
            note_lost=some([0.02, 0.1, 0.3]),
            note_twice=some([0.05, 0.3]),
            note_late=some([0.02, 0.1]),
            note_garbled=some([0.02]),
            note_s=rng.choice([0.0005, 0.002, 0.02]),
            read_fails=some([0.02, 0.1]),
            read_hangs=some([0.02, 0.1]),
            read_falsified=some([0.03, 0.1]) if has_digests else 0.0,
            read_s=rng.choice([0.002, 0.02, 0.2]),
            frame_lost=some([0.01, 0.05]),
            frame_twice=some([0.05]),
            frame_late=some([0.02, 0.1]),
            frame_garbled=some([0.01]),
            channel_stuck=some([0.002]),
            call_s=rng.choice([0.0005, 0.002, 0.02]),
            call_late=some([0.02, 0.1]),
            link_breaks=some([0.005]),
            row_breaks=some([0.002, 0.01]),
        )
