"""How the highest good rate is found: what is tried next, and what comes out, for servers of known curves."""

from __future__ import annotations

import math

import pytest

from benchmarks.gpu.goodput_search import Limits, RatePoint, best, crossing, next_rate


def points(*pairs: tuple[float, float]) -> list[RatePoint]:
    return [RatePoint(rate, ratio) for rate, ratio in pairs]


NEXT = {
    # what is known, the first rate -> the next one
    "nothing": ([], 8.0, 8.0),
    "good by far": (points((8.0, 0.25)), 8.0, 12.0),
    "good by little": (points((8.0, 0.98)), 8.0, 9.0),
    "bad by little": (points((8.0, 1.02)), 8.0, 7.1),
    "bad by far": (points((8.0, 9.0)), 8.0, 5.3),
    "something failed": (points((8.0, math.inf)), 8.0, 5.3),
    "bracketed": (points((8.0, 0.9), (12.0, 1.4)), 8.0, 8.8),
    "bracketed by a failure": (points((8.0, 0.9), (12.0, math.inf)), 8.0, 9.8),
    "near enough": (points((8.0, 0.98), (8.4, 1.01)), 8.0, None),
    "no rate between that one can say": (points((1.0, 0.98), (1.1, 1.2)), 1.0, None),
    "a good one above a bad one": (points((8.0, 1.01), (8.4, 0.99), (7.0, 0.8)), 8.0, 7.8),
}


@pytest.mark.parametrize(("known", "first", "expected"), NEXT.values(), ids=NEXT.keys())
def test_what_is_tried_next(known: list[RatePoint], first: float, expected: float | None) -> None:
    assert next_rate(known, first) == expected


@pytest.mark.parametrize("goodput", [0.5, 1.3, 6.9, 9.4, 22.0])
@pytest.mark.parametrize("steepness", [1.0, 2.0, 8.0])
@pytest.mark.parametrize("first", [1.0, 8.0])
def test_few_runs_find_it(goodput: float, steepness: float, first: float) -> None:
    known: list[RatePoint] = []
    while (rate := next_rate(known, first)) is not None:
        assert rate not in [point.rate for point in known]
        known.append(RatePoint(rate, (rate / goodput) ** steepness))
        assert len(known) <= 12
    found = best(known)
    assert found is not None
    assert goodput / 1.15 <= found.rate <= goodput
    between = crossing(known)
    assert between is not None
    assert between == pytest.approx(goodput, rel=0.05)


def test_what_a_run_comes_to() -> None:
    limits = Limits(ttft_ms=400.0, tpot_ms=10.0)
    figures = {"p90_ttft_ms": 300.0, "p90_tpot_ms": 11.0, "completed": 300, "failed": 0}
    assert limits.ratio(figures) == pytest.approx(1.1)
    assert limits.ratio(figures | {"p90_ttft_ms": 800.0}) == pytest.approx(2.0)
    assert limits.ratio(figures | {"failed": 1}) == math.inf
    assert limits.ratio({"completed": 0, "failed": 0}) == math.inf
    assert best([]) is None
    assert crossing(points((8.0, 0.9))) is None
