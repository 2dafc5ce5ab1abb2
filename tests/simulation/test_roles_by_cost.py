"""Two cards that may do both phases, in the simulator: they carry loads that neither a fixed split nor colocation does.

`python -m benchmarks.simulation roles` has the whole table; here are short runs at one rate of each load.
"""

from __future__ import annotations

import pytest

from benchmarks.simulation.roles import LOADS, CardLayout, SimulatedCards, shortened

BY_COST = CardLayout("split", 1, 1, may_also=True)
SPLIT = CardLayout("split", 1, 1)
COLOCATED = CardLayout("colocated", 0, 2)


def ratio(layout: CardLayout, load: str, rate: float, part: float) -> float:
    """Above 1: p90s are beyond their limits."""
    phases = shortened(LOADS[load], part)
    cards = SimulatedCards(layout, ttft_s=phases[0].limits.ttft_ms / 1e3)
    return cards.ratio(phases, rate / (2 * phases[0].rate), (0,))


@pytest.mark.parametrize(
    ("load", "rate", "part", "failing"),
    [
        ("2048/128", 20.0, 0.3, COLOCATED),  # streams stand still for prompts
        ("512/512", 36.0, 0.3, SPLIT),  # the card for prompts has nothing to do
        ("8192/256", 3.2, 1.0, SPLIT),  # prompts wait
    ],
)
def test_both_phases_by_cost_where_one_layout_fails(load: str, rate: float, part: float, failing: CardLayout) -> None:
    assert ratio(BY_COST, load, rate, part) <= 1.0
    assert ratio(failing, load, rate, part) > 1.0
