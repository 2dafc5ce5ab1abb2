"""Finds the factor on a load's rates at which its limits are just kept: for runs that can be had at any rate.

Pure. The ratio to the limits is taken to be a power of the factor, which p90s nearly are: so the next one to try lies
where the ratio would be one, and a factor whose ratio is nearly one ends the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.gpu.goodput_search import RatePoint, best

_NEAR = 0.02  # a ratio so near one: nobody can tell more
_BRACKET = 1.03  # a bad factor so near a good one, likewise
_MOST_AT_ONCE = 1.5
_POWERS = (0.5, 1.5, 8.0)  # least, where a single point is known, most


def next_factor(points: Sequence[RatePoint], first: float) -> float | None:
    """The factor to try next; None: it is known. first: where nothing is known."""
    if not points:
        return first
    good, bad = best(points), _lowest_bad(points)
    if any(abs(point.ratio - 1.0) <= _NEAR for point in (good, bad) if point is not None):
        return None
    if good is not None and bad is not None:
        return _crossing(good, bad) if bad.rate > good.rate * _BRACKET else None
    (known,) = [point for point in (good, bad) if point is not None]
    return known.rate * min(_MOST_AT_ONCE, max(1 / _MOST_AT_ONCE, _beyond(known, points)))


def just_kept(points: Sequence[RatePoint]) -> float:
    """Where the ratio is one, as those next to it have it. 0.0: nowhere near."""
    good, bad = best(points), _lowest_bad(points)
    if good is not None and bad is not None:
        return _crossing(good, bad)
    (known,) = [point for point in (good, bad) if point is not None]
    if abs(known.ratio - 1.0) <= _NEAR:
        return known.rate * _beyond(known, points)
    return known.rate if known.ratio < 1.0 else 0.0


def _lowest_bad(points: Sequence[RatePoint]) -> RatePoint | None:
    return min((point for point in points if point.ratio > 1.0), key=lambda point: point.rate, default=None)


def _beyond(known: RatePoint, points: Sequence[RatePoint]) -> float:
    """How many times its factor the one is at which the ratio is one, by the power that it and its neighbour have."""
    least, power, most = _POWERS
    if math.isinf(known.ratio):
        return 0.0
    others = [point for point in points if point.rate != known.rate and not math.isinf(point.ratio)]
    if others:
        other = min(others, key=lambda point: abs(math.log(point.ratio)))
        power = math.log(known.ratio / other.ratio) / math.log(known.rate / other.rate)
    return float(known.ratio ** (-1.0 / min(most, max(least, power))))


def _crossing(good: RatePoint, bad: RatePoint) -> float:
    """Between them; where nobody can say where (something failed), in the middle."""
    share = 0.5
    if not math.isinf(bad.ratio) and good.ratio > 0.0:
        share = math.log(1.0 / good.ratio) / math.log(bad.ratio / good.ratio)
    return float(good.rate * (bad.rate / good.rate) ** min(0.95, max(0.05, share)))
