"""The simulated card with two lanes: it gives back what was measured, and rules are told apart."""

from __future__ import annotations

import pytest

from benchmarks.gpu.goodput_search import Limits
from benchmarks.simulation.lanes import LOADS, MEASURED, LaneLoadShape, SimulatedCard, most_work, with_noise
from scheduler.lane_split import ALONE, WHOLE_CARD, LaneLoad, LaneObjectives, LaneRates, LaneShare, choose_share

MORE, LESS = LaneShare(92, 0.63, 0.52), LaneShare(68, 0.48, 0.69)
OBJECTIVES = LaneObjectives(0.4, 0.011)
FEW_ROWS = LaneLoad(2048, 0.0, 8, LaneRates(43_000.0, 0.0052))


def test_the_rule_of_before_looks_for_the_most_work_and_the_shipped_one_for_prompts() -> None:
    assert most_work(FEW_ROWS, OBJECTIVES, (MORE, LESS)) is LESS
    assert choose_share(FEW_ROWS, OBJECTIVES, (MORE, LESS)) is MORE


def test_both_have_the_whole_card_where_nothing_runs_beside() -> None:
    nothing = LaneLoad(2048, 0.0, 0)
    for rule in (most_work, choose_share):
        assert rule(nothing, OBJECTIVES, (MORE, LESS)) is WHOLE_CARD
        assert rule(FEW_ROWS, OBJECTIVES, ()) is ALONE


def test_a_run_on_a_card_is_given_back() -> None:
    """The first minute's worth of the measured run at 8 req/s, within what 15 % are."""
    table, runs = MEASURED["torch's own products, three shares"]
    card = SimulatedCard([LaneShare(*row) for row in table], LaneObjectives(0.4, 0.012), most_work)
    figures = card.figures(LOADS["2048/128"], 8.0, (0,))
    p50_ttft, p90_ttft, p90_tpot, p99_itl = runs[8.0]
    assert figures.p50_ttft_ms == pytest.approx(p50_ttft, rel=0.15)
    assert figures.p90_ttft_ms == pytest.approx(p90_ttft, rel=0.15)
    assert figures.p90_tpot_ms == pytest.approx(p90_tpot, rel=0.15)
    assert figures.p99_itl_ms == pytest.approx(p99_itl, rel=0.15)


def test_the_goodput_lies_where_the_limits_are_just_kept() -> None:
    load = LaneLoadShape(512, 16, 60, Limits(400.0, 1000.0), (5.0, 150.0))
    card = SimulatedCard((MORE, LESS))
    rate = card.goodput(load, (0,), num_halvings=4)
    assert card.figures(load, 0.7 * rate, (0,)).ratio(load.limits) < 1.0
    assert card.figures(load, 1.4 * rate, (0,)).ratio(load.limits) > 1.0


def test_noise_is_bounded_and_the_same_for_a_seed() -> None:
    (noisy,) = with_noise((MORE,), 0.03, 1)
    assert with_noise((MORE,), 0.03, 1) == (noisy,) != with_noise((MORE,), 0.03, 2)
    assert noisy.prefill_rate == pytest.approx(MORE.prefill_rate, rel=0.03)
    assert noisy.decode_rate == pytest.approx(MORE.decode_rate, rel=0.03)
