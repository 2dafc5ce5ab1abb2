"""Two lanes over one ledger under random traffic: steps of one run long before or behind those of the other.

As test_random_workloads: a block that one lane reuses too early, or a slot whose table the other writes late, is a
wrong text.
"""

from __future__ import annotations

import pytest

from scheduler.admission import AdmissionPolicy
from tests.scheduler.simulated_system import Workload
from tests.scheduler.test_random_preemption import OPTIMISTIC
from tests.scheduler.test_random_workloads import FAULTS, run

SEEDS = range(8)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_all_prompts_here(seed: int, lag: int) -> None:
    system = run(Workload(seed, lag, local_share=1.0, beam_rate=0.2, known_rate=0.2, two_lanes=True))
    assert system.decode.num_ahead > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_with_failing_steps(seed: int) -> None:
    run(Workload(seed, lag=seed % 2, local_share=1.0, faults=FAULTS, two_lanes=True))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_beside_kv_that_is_read_and_offered(seed: int, lag: int) -> None:
    """Slots change hands between lanes that way, too."""
    rates = {"local_share": 0.5, "beam_rate": 0.2}
    system = run(Workload(seed, lag, 260, faults=FAULTS, all_able=True, two_lanes=True, **rates))
    assert system.num_handed_over > 20


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1, 4, 5, 6])
def test_with_too_little_memory(seed: int, lag: int) -> None:
    admission: AdmissionPolicy = OPTIMISTIC
    workload = Workload(
        seed, lag, local_share=0.9, admission=admission, host_share=3.0, scarcity=1.5, two_lanes=True, beam_rate=0.1
    )
    preemption = run(workload).decode.scheduler.preemption
    assert preemption.num_swapped > 0
