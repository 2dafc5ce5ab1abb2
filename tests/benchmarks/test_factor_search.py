"""The search for the factor at which limits are just kept: near it, in few runs, whatever the ratio does."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from benchmarks.gpu.goodput_search import RatePoint
from benchmarks.simulation.factor_search import just_kept, next_factor


def search(ratio: Callable[[float], float], first: float = 1.0) -> tuple[float, int]:
    """What it finds, and in how many runs."""
    points: list[RatePoint] = []
    while (factor := next_factor(points, first)) is not None:
        points.append(RatePoint(factor, ratio(factor)))
        assert len(points) < 20
    return just_kept(points), len(points)


@pytest.mark.parametrize("power", [0.6, 1.0, 2.6, 8.0])
@pytest.mark.parametrize("kept", [0.4, 0.93, 1.0, 1.31, 2.9])
def test_a_power_of_the_factor_is_found_in_few_runs(power: float, kept: float) -> None:
    found, num_runs = search(lambda factor: (factor / kept) ** power)
    assert found == pytest.approx(kept, rel=0.015)
    assert num_runs <= 6


def test_a_queue_that_grows_without_bound_is_found() -> None:
    """Flat, then steep, then failures."""

    def ratio(factor: float) -> float:
        return math.inf if factor >= 1.25 else max(0.6, 0.3 / (1.25 - factor) / 3.0)

    found, num_runs = search(ratio)
    assert found == pytest.approx(1.15, rel=0.02)
    assert num_runs <= 9


def test_what_was_never_good_or_never_bad() -> None:
    assert just_kept([RatePoint(1.0, 2.0)]) == 0.0
    assert just_kept([RatePoint(1.0, 0.5), RatePoint(2.0, 0.9)]) == 2.0
    assert just_kept([RatePoint(1.0, 1.015)]) == pytest.approx(0.99, abs=0.003)
