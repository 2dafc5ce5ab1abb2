"""Finds the highest rate at which a server keeps its limits, with few runs: those that were made before count too.

Pure. A run tells how far its latencies are from their limits, as a ratio; between two rates the ratio is taken to grow
as a power of the rate, which near saturation asks for two or three runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NEAR = 1.06  # two rates this close, one of them good: nobody can tell more from 300 requests
_MOST_AT_ONCE = 1.5  # as much higher or lower the next rate is at most, where nothing is bracketed yet


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a run's 90th percentiles, in ms."""

    ttft_ms: float
    tpot_ms: float

    def ratio(self, figures: Mapping[str, Any]) -> float:
        """1.0: just kept. inf: something failed, or nothing came."""
        if figures.get("failed", 0) or not figures.get("completed", 0):
            return math.inf
        return max(figures["p90_ttft_ms"] / self.ttft_ms, figures["p90_tpot_ms"] / self.tpot_ms)


@dataclass(frozen=True, slots=True)
class RatePoint:
    """What a run at a rate came to, by `Limits.ratio`."""

    rate: float
    ratio: float


def next_rate(points: Sequence[RatePoint], first: float) -> float | None:
    """The rate to try next; None: the goodput is known. first: where nothing is known."""
    if not points:
        return first
    good, bad = best(points), _lowest_bad(points)
    if bad is None:
        assert good is not None
        return _rounded(good.rate * min(_MOST_AT_ONCE, max(1.12, 1.0 / max(0.1, good.ratio))))
    if good is None:
        return _rounded(bad.rate / min(_MOST_AT_ONCE, max(1.12, bad.ratio**0.5)))
    if bad.rate <= good.rate * _NEAR:
        return None
    guess = _rounded(_between(good, bad, min(0.8, max(0.2, _share(good, bad)))))  # neither end is tried again
    return guess if good.rate < guess < bad.rate else None


def best(points: Sequence[RatePoint]) -> RatePoint | None:
    """The highest rate that was good, below every rate that was not."""
    bad = _lowest_bad(points)
    good = [point for point in points if point.ratio <= 1.0 and (bad is None or point.rate < bad.rate)]
    return max(good, key=lambda point: point.rate, default=None)


def crossing(points: Sequence[RatePoint]) -> float | None:
    """Where the ratio would be 1, between the good rate and the bad one. None: one of the two is not known."""
    good, bad = best(points), _lowest_bad(points)
    return None if good is None or bad is None else round(_between(good, bad, _share(good, bad)), 2)


def _lowest_bad(points: Sequence[RatePoint]) -> RatePoint | None:
    return min((point for point in points if point.ratio > 1.0), key=lambda point: point.rate, default=None)


def _share(good: RatePoint, bad: RatePoint) -> float:
    """Of the way from one to the other, at which the ratio is 1; between 0 and 1."""
    if math.isinf(bad.ratio) or good.ratio <= 0.0:
        return 0.5
    return math.log(1.0 / good.ratio) / math.log(bad.ratio / good.ratio)


def _between(good: RatePoint, bad: RatePoint, share: float) -> float:
    return good.rate * (bad.rate / good.rate) ** share


def _rounded(rate: float) -> float:
    """Two digits that count: a rate that one can say."""
    return float(f"{rate:.2g}") if rate < 10.0 else round(rate * 2) / 2
