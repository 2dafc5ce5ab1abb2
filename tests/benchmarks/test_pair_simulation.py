"""Two simulated cards give back what two cards were measured to do."""

from __future__ import annotations

import pytest

from benchmarks.simulation.lanes import LOADS
from benchmarks.simulation.pairs import (
    BY_COST,
    MEASURED,
    MEASURED_SINCE,
    SPLIT,
    PairFigures,
    campaign_figures,
    costs_as_measured,
)
from benchmarks.simulation.roles import SimulatedCards


@pytest.mark.parametrize(
    ("load", "rate"),
    [
        ("2048/128", 18.0),  # prompts wait for one another
        pytest.param("512/512", 36.5, marks=pytest.mark.slow),  # steps of 150 rows
        ("8192/256", 2.4),  # prompts in chunks
    ],
)
def test_a_split_on_two_cards_is_given_back(load: str, rate: float) -> None:
    figures = campaign_figures(SimulatedCards(SPLIT, costs=costs_as_measured()), LOADS[load], rate)
    _are_alike(figures, MEASURED[SPLIT][load, rate], load)


@pytest.mark.slow
@pytest.mark.parametrize(("load", "rate"), [("2048/128", 21.5), ("8192/256", 3.0)])
def test_roles_by_cost_on_two_cards_are_given_back(load: str, rate: float) -> None:
    """Forecast before they were measured."""
    _are_alike(campaign_figures(SimulatedCards(BY_COST), LOADS[load], rate), MEASURED_SINCE[BY_COST][load, rate], load)


def _are_alike(figures: PairFigures, measured: PairFigures, load: str) -> None:
    limits = LOADS[load].limits
    assert figures.p90_tpot_ms == pytest.approx(measured.p90_tpot_ms, rel=0.05)
    assert figures.p90_ttft_ms == pytest.approx(measured.p90_ttft_ms, rel=0.15, abs=15.0)
    assert figures.ratio(limits) == pytest.approx(measured.ratio(limits), rel=0.06)
