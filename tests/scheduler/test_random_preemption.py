"""Random traffic with too little memory: outputs are underestimated, so requests give way, and no text may show it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.admission import AdmissionPolicy
from tests.scheduler.simulated_system import SimulatedSystem, Status, Workload
from tests.scheduler.test_random_workloads import FAULTS

# Nearly everything turns out longer than that.
OPTIMISTIC = AdmissionPolicy(quantile=0.1, min_samples=4)


def run(seed: int, lag: int, host_share: float, num_requests: int = 200, *, faulty: bool = False) -> SimulatedSystem:
    workload = Workload(
        seed,
        lag,
        num_requests=num_requests,
        cancel_rate=0.1,
        admission=OPTIMISTIC,
        host_share=host_share,
        scarcity=1.5,
    )
    if faulty:
        workload = replace(workload, faults=FAULTS)
    system = SimulatedSystem(workload)
    system.run()
    statuses = system.statuses()
    assert statuses[Status.OPEN] == 0
    assert statuses[Status.FINISHED] > num_requests // 4
    return system


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5, 6])
def test_with_enough_host_memory(seed: int, lag: int) -> None:
    preemption = run(seed, lag, host_share=3.0).decode.scheduler.preemption
    assert preemption.num_swapped > 0
    assert preemption.num_evicted == 0


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1, 5])
def test_with_little_host_memory(seed: int, lag: int) -> None:
    preemption = run(seed, lag, host_share=0.3).decode.scheduler.preemption
    assert preemption.num_evicted > 0


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1, 5])
def test_with_failing_steps(seed: int, lag: int) -> None:
    assert run(seed, lag, host_share=1.0, faulty=True).decode.scheduler.preemption.num_swapped > 0


def test_without_host_memory_everybody_who_gives_way_is_evicted() -> None:
    preemption = run(1, 1, host_share=0.0).decode.scheduler.preemption
    assert preemption.num_evicted > 0
    assert preemption.num_swapped == 0
