"""Schedulers of both pools under random traffic, against a model in which any scheduling mistake changes the text.

Each run checks, after every move, blocks, references, promises, slots, queue order and the ledger against a
recount from nothing, and at the end every text and that nothing is left. See simulated_system.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.admission import AdmissionPolicy
from scheduler.prefix_book import PrefixOptions
from tests.scheduler.simulated_engine import FaultRates
from tests.scheduler.simulated_system import SimulatedSystem, Status, Workload

SEEDS = range(10)
FAULTS = FaultRates(row_error=0.01, not_a_number=0.01, engine=0.003)


def run(workload: Workload) -> SimulatedSystem:
    system = SimulatedSystem(workload)
    system.run()
    # The run was worth it: most requests ended well, some early.
    statuses = system.statuses()
    assert statuses[Status.OPEN] == 0
    assert statuses[Status.FINISHED] > workload.num_requests // 4
    assert statuses[Status.ENDED] > workload.num_requests // 20
    return system


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_split(seed: int, lag: int) -> None:
    system = run(Workload(seed, lag, local_share=0.0))
    assert system.num_handed_over > 40


@pytest.mark.parametrize("lag", [0, 1])
def test_prompts_in_many_parts(lag: int) -> None:
    """Read while they are computed, and given up by either side between two parts."""
    many = Workload(0, lag, local_share=0.0, prefill_step_tokens=3, lost_read_rate=0.2)
    systems = [run(replace(many, seed=seed, faults=FAULTS if seed % 2 else FaultRates())) for seed in range(3)]
    assert all(system.num_handed_over > 10 for system in systems)
    assert all(system.num_early > 10 for system in systems)
    assert any(system.num_ended_between for system in systems)


@pytest.mark.parametrize("two_lanes", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_prompts_cut_at_multiples(seed: int, two_lanes: bool) -> None:
    """Of less than a step has room for, behind prefixes that were found anywhere."""
    prefixes = PrefixOptions("model")
    run(Workload(seed, 1, local_share=0.6, chunk_multiple=4, two_lanes=two_lanes, prefixes=prefixes, faults=FAULTS))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_colocated(seed: int, lag: int) -> None:
    system = run(Workload(seed, lag, local_share=1.0))
    assert (system.decode.scheduler.batch.num_surplus_tokens > 0) == (lag > 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_split_and_local_with_failing_steps(seed: int) -> None:
    run(Workload(seed, lag=seed % 2, local_share=0.4, faults=FAULTS))


@pytest.mark.parametrize("seed", range(3))
def test_a_longer_lag(seed: int) -> None:
    run(Workload(seed, lag=3, local_share=0.5, faults=FAULTS))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_engines_that_can_do_everything(seed: int, lag: int) -> None:
    """What is offered is promised by the projection too."""
    system = run(Workload(seed, lag, local_share=0.3, faults=FAULTS, beam_rate=0.2, all_able=True))
    assert system.num_handed_over > 20


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_who_has_begun_and_suspects(seed: int, lag: int) -> None:
    """Order, passings, and one suspect at a time are looked at in every turn."""
    admission = AdmissionPolicy(max_overtakes=seed)
    system = run(Workload(seed, lag, faults=FAULTS, beam_rate=0.1, admission=admission, has_replays=True))
    assert system.decode.num_suspects > 10
    assert (system.decode.num_overtaken.total() > 10) == (seed > 0)
