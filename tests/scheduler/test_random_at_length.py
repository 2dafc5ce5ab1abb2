"""Random traffic of the other files, 200 histories of each kind: forks, searches, requests that give way, two lanes.

Here it is only checked that nothing is wrong and nothing hangs; that such runs are worth it, by the files that have
them one by one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scheduler.simulated_system import SimulatedSystem, Status, Workload
from tests.scheduler.test_random_preemption import OPTIMISTIC
from tests.scheduler.test_random_workloads import FAULTS

SEEDS = range(100, 300)
LAGS = (0, 1, 3)
CALM = Workload(0, 0, num_requests=60)
SCARCE = replace(CALM, cancel_rate=0.1, admission=OPTIMISTIC, scarcity=1.5)
WORKLOADS = {
    "split": replace(CALM, local_share=0.0),
    "colocated": replace(CALM, local_share=1.0),
    "failing steps": replace(CALM, local_share=0.4, faults=FAULTS),
    "both can do all": replace(CALM, local_share=0.3, faults=FAULTS, beam_rate=0.2, all_able=True),
    "searches": replace(CALM, beam_rate=0.4),
    "nothing but searches, failing steps": replace(CALM, faults=FAULTS, beam_rate=1.0),
    "searches that give way": replace(SCARCE, host_share=0.6, scarcity=2.0, beam_rate=0.4),
    "much host memory": replace(SCARCE, host_share=3.0),
    "little host memory": replace(SCARCE, host_share=0.3),
    "no host memory": SCARCE,
    "giving way, failing steps": replace(SCARCE, host_share=1.0, faults=FAULTS),
    "two lanes": replace(CALM, local_share=1.0, beam_rate=0.2, known_rate=0.2, two_lanes=True),
    "two lanes, failing steps": replace(CALM, local_share=1.0, faults=FAULTS, two_lanes=True),
    "two lanes, both can do all": replace(CALM, faults=FAULTS, beam_rate=0.2, all_able=True, two_lanes=True),
    "two lanes, giving way": replace(SCARCE, local_share=0.9, host_share=3.0, two_lanes=True, beam_rate=0.1),
}


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", WORKLOADS)
def test_many_histories(name: str) -> None:
    num_finished = num_requests = 0
    for seed in SEEDS:
        system = SimulatedSystem(replace(WORKLOADS[name], seed=seed, lag=LAGS[seed % 3]))
        system.run()
        statuses = system.statuses()
        assert statuses[Status.OPEN] == 0
        num_finished += statuses[Status.FINISHED]
        num_requests += system.workload.num_requests
    print(f"{name}: {num_finished} of {num_requests} requests came to their end")
    assert num_finished > num_requests // 3
