"""Random traffic in which many requests are beam searches: their tables are permuted, forked and swapped all the time.

Everything of test_random_workloads.py holds, and every search returns the texts of one without blocks, slots or lag.
"""

from __future__ import annotations

import pytest

from scheduler.admission import AdmissionPolicy
from tests.scheduler.simulated_engine import FaultRates
from tests.scheduler.simulated_system import SimulatedSystem, Status, Workload

OPTIMISTIC = AdmissionPolicy(quantile=0.1, min_samples=4)
FAULTS = FaultRates(row_error=0.01, not_a_number=0.01, engine=0.003)


def run(workload: Workload) -> SimulatedSystem:
    system = SimulatedSystem(workload)
    system.run()
    statuses = system.statuses()
    assert statuses[Status.OPEN] == 0
    assert statuses[Status.FINISHED] > workload.num_requests // 4
    searches = [client for client in system.clients.values() if client.request.search is not None]
    assert sum(client.status is Status.FINISHED for client in searches) > len(searches) // 4
    assert system.decode.num_beam_rows > 100
    return system


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("local_share", [0.0, 1.0])
def test_beside_other_requests(seed: int, lag: int, local_share: float) -> None:
    run(Workload(seed, lag, local_share=local_share, beam_rate=0.4))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_but_searches_and_failing_steps(seed: int, lag: int) -> None:
    run(Workload(seed, lag, faults=FAULTS, beam_rate=1.0))


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("host_share", [0.0, 0.6, 3.0])
def test_with_too_little_memory(lag: int, host_share: float) -> None:
    num_swapped = num_evicted = 0
    for seed in range(3, 9):
        workload = Workload(
            seed, lag, cancel_rate=0.1, admission=OPTIMISTIC, host_share=host_share, scarcity=2.0, beam_rate=0.4
        )
        system = run(workload)
        num_swapped += system.decode.num_beams_swapped
        num_evicted += system.decode.scheduler.preemption.num_evicted
    assert (num_swapped > 0) == (host_share > 0.0), "no search was ever swapped out"
    assert (num_evicted > 0) == (host_share < 3.0)
