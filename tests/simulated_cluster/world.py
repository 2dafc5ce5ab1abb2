"""What all parts of one simulation share: its dice, time, weather and trace, and what was found to be wrong."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.simulated_cluster.odds import Odds
from tests.simulated_cluster.trace import Trace


class World:
    """odds: as they are now. wrong: what should never be, in words. seen: how often what has happened."""

    def __init__(self, rng: random.Random, odds: Odds, loop: asyncio.AbstractEventLoop) -> None:
        self.rng, self.odds, self.loop = rng, odds, loop
        self.trace = Trace(loop.time)
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()

    @property
    def now_s(self) -> float:
        return self.loop.time()

    def happens(self, chance: float) -> bool:
        return chance > 0.0 and self.rng.random() < chance

    def about(self, mean_s: float) -> float:
        """A time around this one: mostly less than twice as long, sometimes much longer."""
        return self.rng.expovariate(1.0 / mean_s)

    def later(self, delay_s: float, act: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, act, *arguments)

    def found_wrong(self, who: str, text: str, *values: Any) -> None:
        """An invariant does not hold."""
        self.wrong.append(f"{who}: {text % values}")
        self.trace(who, "WRONG: " + text, *values)

    def fault(self, who: str, kind: str, text: str = "", *values: Any) -> None:
        """Something was done to somebody."""
        self.seen[kind] += 1
        self.trace(who, f"~~ {kind} {text}", *values)
