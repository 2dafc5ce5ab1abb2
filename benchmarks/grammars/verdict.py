"""A figure beside the most that it may be, and how surely it was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.load.percentile import percentile
from cluster.load.tables import table

_SURE = 1.96  # standard deviations: 95 of 100 times

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Figure:
    """most: None where nothing is asked of it. compared: what it was computed from, for people.

    interval: where the true value is, 95 of 100 times; None where that is not known. noise: the same of what nothing
    was added to. A figure that has an interval is told only where the whole of it is on one side of `most`, and missed
    only where noise alone is below.
    """

    name: str
    value: float
    unit: str
    most: float | None = None
    compared: str = ""
    interval: Interval | None = None
    noise: Interval | None = None

    @property
    def verdict(self) -> str:
        """reached, missed, not told, or nothing where nothing is asked."""
        if self.most is None:
            return ""
        low, high = self.interval or (self.value, self.value)
        if high <= self.most:
            return "reached"
        is_below = low <= self.most or (self.noise is not None and self.noise[1] > self.most)
        return "not told" if is_below else "missed"

    @property
    def is_missed(self) -> bool:
        return self.verdict == "missed"


def share_figure(
    name: str, values: Sequence[float], share: float, unit: str, most: float | None = None, noise: Sequence[float] = ()
) -> Figure:
    """A percentile and its interval. noise: values that nothing was added to."""
    interval = percentile_interval(values, share)
    told = f"{interval[0]:.3g} to {interval[1]:.3g}, of {len(values)}"
    of_noise = percentile_interval(noise, share) if noise else None
    return Figure(f"{name}, p{share:g}", percentile(values, share), unit, most, told, interval, of_noise)


def percentile_interval(values: Sequence[float], share: float) -> Interval:
    """Where the percentile of what the values were drawn from is, 95 of 100 times, whatever its distribution: how many
    of n values are below it is binomial. Infinite where there are too few values to say; they need no order."""
    ordered = [-math.inf, *sorted(values), math.inf]
    below = len(values) * share / 100
    around = _SURE * math.sqrt(below * (1 - share / 100))
    low, high = math.floor(below - around), math.ceil(below + around) + 1
    return ordered[max(0, low)], ordered[min(len(ordered) - 1, high)]


def as_table(figures: Sequence[Figure]) -> str:
    """For people."""
    rows = [
        [
            figure.name,
            f"{figure.value:.3g} {figure.unit}",
            "-" if figure.most is None else f"{figure.most:g}",
            figure.verdict,
            figure.compared,
        ]
        for figure in figures
    ]
    return table(["", "measured", "at most", "", "of"], rows)
