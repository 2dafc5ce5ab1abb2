"""Rows with drafts under random traffic: whatever holds of them, texts, blocks and promises are as without.

As test_random_workloads. A draft's KV that is read although the draft did not count, a block that was given back while
a step in flight writes it, or a row beside where its sequence is, is a wrong text.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.prefix_book import PrefixOptions
from tests.scheduler.simulated_system import SimulatedSystem, Status, Workload
from tests.scheduler.test_random_preemption import OPTIMISTIC
from tests.scheduler.test_random_workloads import FAULTS

CALM = Workload(0, 0, num_requests=80, cancel_rate=0.1, beam_rate=0.1, max_drafts=5)
SCARCE = replace(CALM, admission=OPTIMISTIC, scarcity=1.5)
WORKLOADS = {
    "colocated": replace(CALM, local_share=1.0),
    "split": replace(CALM, local_share=0.1, faults=FAULTS),
    "two lanes": replace(CALM, local_share=1.0, two_lanes=True, faults=FAULTS),
    "can do all": replace(CALM, local_share=0.4, all_able=True, faults=FAULTS),
    "tokens to be known": replace(CALM, local_share=1.0, known_rate=0.5),
    "prefixes": replace(CALM, local_share=0.5, prefixes=PrefixOptions("model")),
    "prefixes, two lanes": replace(CALM, local_share=1.0, two_lanes=True, prefixes=PrefixOptions("model")),
    "preemption": replace(SCARCE, local_share=0.5, host_share=3.0),
    "preemption, little host memory": replace(SCARCE, local_share=0.5, host_share=0.3, faults=FAULTS),
    "preemption, two lanes": replace(SCARCE, local_share=0.9, host_share=3.0, two_lanes=True),
    "preemption, prefixes": replace(SCARCE, local_share=0.5, host_share=3.0, prefixes=PrefixOptions("model")),
}


def check(name: str, seeds: range) -> None:
    """Every seed, with lags of 0 to 3 and drafts that hold never to always in turn; and these runs were worth it."""
    systems = []
    for seed in seeds:
        systems.append(SimulatedSystem(replace(WORKLOADS[name], seed=seed, lag=seed % 4, right_drafts=(seed % 5) / 4)))
        systems[-1].run()
        statuses = systems[-1].statuses()
        assert statuses[Status.OPEN] == 0
        assert statuses[Status.FINISHED] > systems[-1].workload.num_requests // 4
    drafts = [system.decode.drafts for system in systems if system.decode.drafts is not None]
    assert sum(one.num_drafted for one in drafts) > 40 * len(seeds)
    assert sum(one.num_held for one in drafts) > 10 * len(seeds)
    assert sum(one.num_none for one in drafts) > 0
    assert sum(system.decode.num_given_back for system in systems) > 0
    if "preemption" in name:
        assert sum(system.decode.scheduler.preemption.num_swapped for system in systems) > 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_some_histories(name: str) -> None:
    check(name, range(1, 5))


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_more_histories(name: str) -> None:
    check(name, range(5, 30))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.timeout(1200)
def test_many_histories(name: str) -> None:
    check(name, range(100, 300))
