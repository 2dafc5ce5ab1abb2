"""Pools that share a machine's cores or memory: each one's steps take longer while another's are under way."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class _Step:
    """The latest step of one engine. goes_on: the next one follows at once. slowed_until_s: up to then its end takes
    account of others; debt_s: by which it turned out longer, as others began meanwhile.
    """

    pool: str
    end_s: float
    goes_on: bool
    slowed_until_s: float
    contention: float
    debt_s: float = 0.0


class SharedMachine:
    """An engine's end of a step is known when it is launched, so what begins later and slows it is made up for by its
    next step, which begins so much later. Engines of one pool do not slow each other here.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}  # by engine

    def launch(self, engine: int, pool: str, start_s: float, alone_s: float, contention: float, goes_on: bool) -> float:
        """When a step ends that takes alone_s by itself, and `contention` times that beside another pool's. Mutates.

        goes_on: another step of this engine follows it.
        """
        before = self._steps.get(engine)
        if before is not None and start_s < before.end_s + before.debt_s:
            start_s = before.end_s + before.debt_s
        others = [step for step in self._steps.values() if step.pool != pool and step.end_s + step.debt_s > start_s]
        if any(step.goes_on for step in others):
            busy_until_s = math.inf
        else:
            busy_until_s = max((step.end_s + step.debt_s for step in others), default=start_s)
        end_s = start_s + slowed_s(alone_s, contention, busy_until_s - start_s)
        slowed_until_s = min(end_s, busy_until_s)
        for step in others:
            _slow(step, start_s, end_s)
        self._steps[engine] = _Step(pool, end_s, goes_on, slowed_until_s, contention)
        return end_s


def slowed_s(alone_s: float, contention: float, beside_s: float) -> float:
    """Seconds that work takes of which the first beside_s pass beside another pool's. Pure."""
    if alone_s * contention <= beside_s:
        return alone_s * contention
    return alone_s + beside_s * (1 - 1 / contention)


def _slow(step: _Step, start_s: float, end_s: float) -> None:
    """Another pool's step from start_s to end_s slows this one, which did not know. Mutates."""
    begin_s, own_end_s = max(start_s, step.slowed_until_s), step.end_s + step.debt_s
    if begin_s >= own_end_s:
        return
    rest_s = own_end_s - begin_s
    step.debt_s += slowed_s(rest_s, step.contention, max(0.0, end_s - begin_s)) - rest_s
    step.slowed_until_s = max(step.slowed_until_s, min(end_s, step.end_s + step.debt_s))
