"""The simulation finds what it is there for: bugs put into the shipped code, each within 200 seeds."""

from __future__ import annotations

import pytest

from tests.simulated_cluster.deliberate_bugs import BUGS, with_bug
from tests.simulated_cluster.seed_run import Simulation

_MOST_SEEDS = 200


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("bug", BUGS)
def test_the_bug_is_found(one: Simulation, bug: str) -> None:
    with with_bug(bug):
        found = next((run for seed in range(_MOST_SEEDS) if (run := one.run(seed)).wrong), None)
    assert found is not None, f"{_MOST_SEEDS} seeds have not shown it"
    assert str(found.seed) in str(found), "its seed is told"
    assert one.run(found.seed).wrong == (), "without the bug all is well"
