"""Both schedulers under random traffic, against a model in which any scheduling mistake changes the text."""

from __future__ import annotations

import pytest

from tests.scheduler.simulated_engine import FaultRates
from tests.scheduler.simulated_system import SimulatedSystem, Status, Workload

FAULTS = FaultRates(row_error=0.01, not_a_number=0.01, engine=0.005)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_split(seed: int, lag: int) -> None:
    system = SimulatedSystem(Workload(seed, lag, local_share=0.0))
    system.run()
