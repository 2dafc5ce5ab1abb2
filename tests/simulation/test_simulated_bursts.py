"""Bursts in the simulator: who waits for replicas on their way, who moves to them, and what that is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from cluster.autoscaling.pool_scaler import PoolState
from cluster.routing.demand_report import DemandReport
from cluster.simulation.client import ClientStatus, Job
from cluster.simulation.router_times import RouterTimes
from cluster.simulation.simulated_autoscaler import SimulatedAutoscaler
from cluster.simulation.simulated_system import SimulatedSystem, SystemRun
from tests.simulation.small_system import COSTS, shape

QUEUE_S, START_S = 5.0, 20.0


@dataclass
class Ordered:
    """More decode replicas from a second after the burst on."""

    num_decode: int

    def decide(
        self,
        now_s: float,
        reports: Mapping[str, DemandReport],
        pools: Mapping[str, PoolState],
        ongoing: Mapping[str, int],
    ) -> Mapping[str, int]:
        return {"prefill": 1, "decode": self.num_decode if now_s >= 1.0 else 1}


def burst(num_jobs: int, output_len: int = 500) -> list[Job]:
    return [Job(index, 0.01 * index, 100, output_len, output_len) for index in range(num_jobs)]


def run(
    jobs: list[Job], num_decode: int, tells: bool = True, moves: bool = True, num_routers: int = 1
) -> tuple[SystemRun, SimulatedSystem]:
    """One decode replica with room for some six of them; what was ordered comes after START_S."""
    times = RouterTimes(QUEUE_S, 1e4, 1e5, max_queued_requests=10**6, settle_s=1.0 if moves else float("inf"))
    system = SimulatedSystem(replace(shape(1, 1, num_routers=num_routers), times=times), COSTS)
    SimulatedAutoscaler(system, Ordered(num_decode), {"prefill": (1, 1), "decode": (1, 6)}, START_S, tells)
    return system.run(jobs), system


def ends(result: SystemRun) -> Counter[ClientStatus]:
    return Counter(client.status for client in result.clients)


def num_moves(system: SimulatedSystem) -> int:
    return sum(router.waits.num_moves for router in system.routers)


@pytest.mark.parametrize("num_routers", [1, 3])
def test_a_burst_is_served_by_the_replicas_that_it_ordered(num_routers: int) -> None:
    jobs = burst(60)
    before, old = run(jobs, 3, tells=False, moves=False, num_routers=num_routers)
    after, new = run(jobs, 3, num_routers=num_routers)
    assert ends(before)[ClientStatus.QUEUE_TIMEOUT] > 20
    assert ends(after) == {ClientStatus.FINISHED: 60}
    assert all(client.num_tokens == client.job.output_len for client in after.clients)
    assert all(decode.counts.num_steps == 0 for name, decode in old.decodes.items() if name != "decode-0000")
    assert len(new.decodes) == 3
    assert all(decode.counts.num_steps > 500 for decode in new.decodes.values())
    assert 0 < num_moves(new) < 2 * len(jobs)


def test_to_wait_without_moving_is_to_wait_in_vain() -> None:
    """Everybody is answered, by the first replica alone; those that were ordered have nothing to do."""
    jobs = burst(60)
    staying, idle = run(jobs, 3, moves=False)
    moving, _ = run(jobs, 3)
    assert [len(idle.decodes), sum(decode.counts.num_steps > 0 for decode in idle.decodes.values())] == [3, 1]
    assert ends(staying) == ends(moving) == {ClientStatus.FINISHED: 60}
    assert max(client.last_s for client in moving.clients) < max(client.last_s for client in staying.clients) - 10


def test_where_nothing_is_ordered_all_is_as_before() -> None:
    jobs = burst(60)
    before, _ = run(jobs, 1, tells=False, moves=False)
    after, system = run(jobs, 1)
    assert ends(after) == ends(before)
    assert ends(after)[ClientStatus.QUEUE_TIMEOUT] > 20
    assert num_moves(system) == 0
    assert [(c.first_s, c.last_s) for c in after.clients] == [(c.first_s, c.last_s) for c in before.clients]


def test_they_go_in_the_order_in_which_they_came() -> None:
    """All are alike: nobody gets his first token after somebody who came a good while later."""
    result, _ = run(burst(60), 3)
    firsts = [client.first_s for client in result.clients]
    for index, first_s in enumerate(firsts[:-12]):
        assert first_s <= min(firsts[index + 12 :]) + 1.0


def test_prompts_behind_many_go_to_prefill_replicas_that_were_ordered() -> None:
    """Decode has room for all; handoff_timeout_s is less than a start takes."""
    jobs = [Job(index, 0.01 * index, 2000, 4, 4) for index in range(200)]
    times = RouterTimes(QUEUE_S, 8.0, 1e5, max_queued_requests=10**6)
    ends_s = {}
    for settle_s in (1.0, float("inf")):
        system = SimulatedSystem(
            replace(shape(1, 1, num_blocks=40_000, max_sequences=256), times=replace(times, settle_s=settle_s)), COSTS
        )
        SimulatedAutoscaler(system, PrefillOrdered(3), {"prefill": (1, 3), "decode": (1, 1)}, 10.0)
        result = system.run(jobs)
        assert ends(result) == {ClientStatus.FINISHED: 200}
        served = [prefill.counts.num_steps for prefill in system.prefills.values()]
        assert len(served) == 3
        assert (min(served) > 0) is (settle_s == 1.0)
        assert (num_moves(system) > 0) is (settle_s == 1.0)
        ends_s[settle_s] = max(client.last_s for client in result.clients)
    assert ends_s[1.0] < ends_s[float("inf")]


@dataclass
class PrefillOrdered(Ordered):
    """Likewise, of prefill."""

    def decide(self, now_s: float, *_: object) -> Mapping[str, int]:
        return {"prefill": self.num_decode if now_s >= 1.0 else 1, "decode": 1}
