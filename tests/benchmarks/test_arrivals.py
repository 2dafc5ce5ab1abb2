"""Arrival times: the rate asked for, the burstiness asked for, the same ones for the same seed."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from cluster.load.arrivals import constant_arrivals, gamma_arrivals, poisson_arrivals, trace_arrivals


def _gaps(times_s: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times_s)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_gamma_has_the_rate_and_the_spread_asked_for(rate: float, burstiness: float) -> None:
    gaps = _gaps(gamma_arrivals(rate, burstiness, 40_000, seed=3))
    assert statistics.fmean(gaps) == pytest.approx(1 / rate, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(1 / rate / math.sqrt(burstiness), rel=0.05)


def test_poisson_counts_have_the_variance_of_their_mean() -> None:
    times_s = poisson_arrivals(10.0, 50_000, seed=1)
    counts = [0] * (int(times_s[-1]) + 1)
    for time_s in times_s:
        counts[int(time_s)] += 1
    assert statistics.fmean(counts[:-1]) == pytest.approx(10.0, rel=0.02)
    assert statistics.pvariance(counts[:-1]) == pytest.approx(10.0, rel=0.1)


def test_a_seed_is_a_schedule() -> None:
    assert poisson_arrivals(3.0, 50, seed=7) == poisson_arrivals(3.0, 50, seed=7)
    assert poisson_arrivals(3.0, 50, seed=7) != poisson_arrivals(3.0, 50, seed=8)
    # A longer run begins like a shorter one.
    assert gamma_arrivals(3.0, 0.5, 50, seed=7)[:10] == gamma_arrivals(3.0, 0.5, 10, seed=7)


def test_constant() -> None:
    assert constant_arrivals(4.0, 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_everything_at_once() -> None:
    assert poisson_arrivals(math.inf, 3, seed=0) == [0.0, 0.0, 0.0]
    assert constant_arrivals(math.inf, 2) == [0.0, 0.0]


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_refuses_a_rate_that_is_none(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        poisson_arrivals(rate, 1, seed=0)


def test_refuses_no_burstiness() -> None:
    with pytest.raises(ValueError, match="burstiness"):
        gamma_arrivals(1.0, 0.0, 1, seed=0)


def test_a_trace_starts_at_zero_and_is_sorted() -> None:
    assert trace_arrivals([105.0, 101.0, 103.0]) == [0.0, 2.0, 4.0]
    assert trace_arrivals([]) == []


def test_a_trace_at_another_rate_keeps_its_shape() -> None:
    # 4 gaps in 8 s are 0.5 a second; at 2 a second they take 2 s.
    assert trace_arrivals([10.0, 11.0, 11.0, 14.0, 18.0], rate_per_s=2.0) == [0.0, 0.25, 0.25, 1.0, 2.0]
    assert trace_arrivals([10.0, 18.0], rate_per_s=math.inf) == [0.0, 0.0]


def test_a_trace_without_time_has_no_rate() -> None:
    with pytest.raises(ValueError, match="same time"):
        trace_arrivals([5.0, 5.0], rate_per_s=1.0)
