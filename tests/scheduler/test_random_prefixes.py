"""Random traffic whose prompts begin as others do: with a prefix cache no text, no block and no promise is wrong.

As test_random_workloads, checked after every move: a name says what lies in its block, whoever finds a block has the
salt of who filled it, and what several requests hold is counted once (`brute_cache`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.prefix_book import PrefixOptions
from tests.scheduler.simulated_system import SimulatedSystem, Status, Workload
from tests.scheduler.test_random_workloads import FAULTS

CACHED = PrefixOptions("model")
CALM = Workload(0, 0, num_requests=100, cancel_rate=0.1, prefixes=CACHED)


def run(workload: Workload) -> SimulatedSystem:
    system = SimulatedSystem(workload)
    system.run()
    statuses = system.statuses()
    assert statuses[Status.OPEN] == 0
    assert statuses[Status.FINISHED] > workload.num_requests // 4
    return system


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_colocated(seed: int, lag: int) -> None:
    system = run(replace(CALM, seed=seed, lag=lag, local_share=1.0, beam_rate=0.1))
    assert system.decode.cache.num_found > 20
    assert system.decode.scheduler.allocator.counts().cached > 0


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_split(seed: int, lag: int) -> None:
    system = run(replace(CALM, seed=seed, lag=lag, local_share=0.1, beam_rate=0.1, faults=FAULTS))
    assert system.prefill.cache.num_found > 10
    assert system.num_kept > 0
