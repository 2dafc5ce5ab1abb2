"""Replicas that come and go in the simulator: when they take work, what they cost, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.simulation.serve_default_policy import ServeDefaultPolicy, StaticSplit
from cluster.autoscaling.pool_scaler import PoolState
from cluster.autoscaling.scaling_rules import scaling_rules
from cluster.config.root import Config
from cluster.routing.demand_report import DemandReport
from cluster.simulation.client import ClientStatus, Job
from cluster.simulation.simulated_autoscaler import ShippedPolicy, SimulatedAutoscaler
from cluster.simulation.simulated_system import SimulatedSystem, SystemRun
from tests.simulation.small_system import COSTS, random_jobs, shape

DELAY_S = 7.0


@dataclass
class Plan:
    """Targets by a function of the time."""

    wanted: Callable[[float], dict[str, int]]

    def decide(
        self,
        now_s: float,
        reports: Mapping[str, DemandReport],
        pools: Mapping[str, PoolState],
        ongoing: Mapping[str, int],
    ) -> Mapping[str, int]:
        return self.wanted(now_s)


def run(policy: Any, jobs: list[Job], num_prefill: int = 1, num_decode: int = 1) -> tuple[SystemRun, Any, Any]:
    system = SimulatedSystem(shape(num_prefill, num_decode, num_routers=2), COSTS)
    scaler = SimulatedAutoscaler(system, policy, {"prefill": (0, 6), "decode": (0, 6)}, DELAY_S)
    return system.run(jobs), scaler, system


def all_finished(result: SystemRun) -> bool:
    return all(
        client.status is ClientStatus.FINISHED and client.num_tokens == client.job.output_len
        for client in result.clients
    )


def test_a_fixed_number_costs_its_time_and_changes_no_result() -> None:
    jobs = random_jobs(1, 200, 4.0)
    result, scaler, _ = run(StaticSplit(), jobs, 1, 2)
    alone = SimulatedSystem(shape(1, 2, num_routers=2), COSTS).run(jobs)
    assert [(c.first_s, c.last_s) for c in result.clients] == [(c.first_s, c.last_s) for c in alone.clients]
    end_s = scaler.samples[-1].time_s
    assert max(client.last_s for client in result.clients) <= end_s + 1.0
    assert scaler.replica_hours() == pytest.approx({"prefill": end_s / 3600, "decode": 2 * end_s / 3600})


def test_replicas_take_work_after_their_start_and_drain_before_they_go() -> None:
    jobs = random_jobs(2, 600, 10.0)  # a minute
    grown = {"prefill": 2, "decode": 3}
    result, scaler, system = run(Plan(lambda now_s: grown if 10 <= now_s < 40 else {"prefill": 1, "decode": 1}), jobs)
    assert all_finished(result)
    running = {round(sample.time_s): sample.running for sample in scaler.samples}
    assert running[16] == {"prefill": 1, "decode": 1}
    assert running[18] == grown
    assert running[41] == {"prefill": 1, "decode": 1}
    assert [len(system.decodes), len(system.prefills)] == [3, 2]
    assert all(system.decodes[name].counts.num_steps > 0 for name in ("decode-0001", "decode-0002"))
    # From the order at 10 s to 40 s, and a little to drain.
    extra = {name: hours - scaler.samples[-1].time_s / 3600 for name, hours in scaler.replica_hours().items()}
    assert 30 <= 3600 * extra["prefill"] <= 45
    assert 60 <= 3600 * extra["decode"] <= 90


def test_who_was_ordered_and_is_not_wanted_any_more_never_starts() -> None:
    jobs = random_jobs(3, 100, 5.0)
    result, scaler, system = run(Plan(lambda now_s: {"prefill": 1, "decode": 4 if 3 <= now_s < 6 else 1}), jobs)
    assert all_finished(result)
    assert len(system.decodes) == 1
    extra_s = 3600 * scaler.replica_hours()["decode"] - scaler.samples[-1].time_s
    assert extra_s == pytest.approx(9.0)


def test_requests_are_held_while_a_pool_is_empty() -> None:
    jobs = random_jobs(4, 50, 5.0)
    empty = {"prefill": 0, "decode": 0}
    result, scaler, _ = run(Plan(lambda now_s: empty if now_s < 20 else {"prefill": 1, "decode": 1}), jobs)
    assert all_finished(result)
    late = [client.first_s for client in result.clients if client.job.arrival_s > 1.0]
    assert min(late) > 20 + DELAY_S
    assert scaler.replica_hours()["decode"] > 0


def test_the_shipped_policy_grows_shrinks_and_loses_nothing() -> None:
    scaling = {"min_replicas": 0, "max_replicas": 6, "upscale_delay_s": 2.0, "downscale_delay_s": 20.0}
    pool = {"kv_capacity_tokens": 4096, "autoscaling": scaling | {"downscale_to_zero_delay_s": 15.0}}
    rules = scaling_rules(
        Config.model_validate({"pools": {"prefill": pool, "decode": pool | {"max_running_sequences": 16}}})
    )
    busy = random_jobs(5, 1500, 30.0)
    later = [Job(1500 + job.index, 300.0 + job.arrival_s, job.prompt_len, 20, 20) for job in random_jobs(6, 5, 1.0)]
    result, scaler, _ = run(ShippedPolicy(rules), [*busy, *later])
    assert all_finished(result)
    decodes = [sample.running["decode"] for sample in scaler.samples]
    assert max(decodes) >= 3
    assert 0 in decodes
    assert decodes[-1] == 1
    static = 2 * max(decodes) * scaler.samples[-1].time_s / 3600
    assert sum(scaler.replica_hours().values()) < static / 2


def test_serves_default_policy_runs_by_calls_in_progress() -> None:
    jobs = random_jobs(7, 1200, 20.0)
    result, scaler, _ = run(ServeDefaultPolicy({"prefill": 4.0, "decode": 4.0}, 5.0, 30.0), jobs)
    assert all_finished(result)
    assert max(sample.targets["decode"] for sample in scaler.samples) > 1
