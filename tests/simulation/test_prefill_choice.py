"""The shipped choice of where a prompt is computed, in whole systems: a split server with slow transfers is no slower
than a colocated one, and one with fast transfers is what it was."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.load.percentile import percentile
from cluster.policies.routing_policy import Need, NeverFits, Route, RoutingRules, Unavailable
from cluster.simulation.client import ClientStatus, Job
from cluster.simulation.cost_model import load_costs
from cluster.simulation.router_times import RouterTimes
from cluster.simulation.simulated_system import SimulatedSystem
from cluster.simulation.system_shape import PoolShape, SystemShape
from scheduler.admission import AdmissionPolicy
from scheduler.pool_limits import PoolLimits

COSTS = load_costs(Path(__file__).parents[2] / "benchmarks/step_times/llama-3.1-8b-h100.json")


@dataclass(frozen=True)
class Result:
    """Seconds; kinds: of the routes. num_failed: requests."""

    num_failed: int
    ttft_p90_s: float
    tpot_p90_s: float
    kinds: Counter[str]


def run(num_prefill: int, bytes_per_s: float, by_cost: bool = True, rate_per_s: float = 4.0) -> Result:
    """160 requests of 2,048 tokens in, 128 out, Poisson; one decode replica."""
    transfer = COSTS.transfer.model_copy(update={"bytes_per_s": bytes_per_s})
    limits = PoolLimits(num_blocks=20_000, block_size=16, max_sequences=256, max_step_tokens=8_192)
    shape = SystemShape(
        num_routers=1,
        prefill=PoolShape(num_prefill, limits, lag=1) if num_prefill else None,
        decode=PoolShape(1, limits, lag=1),
        admission=AdmissionPolicy(),
        num_host_blocks=0,
        max_model_len=32_768,
        rules=RoutingRules(bool(num_prefill), 0, False, local_by_cost=by_cost),
        times=RouterTimes(30.0, handoff_timeout_s=30.0, request_timeout_s=600.0, max_queued_requests=256),
    )
    system = SimulatedSystem(shape, COSTS.model_copy(update={"transfer": transfer}))
    kinds: Counter[str] = Counter()
    (router,) = system.routers
    decide = router._decide

    def counted(need: Need) -> Route | NeverFits | Unavailable:
        route = decide(need)
        assert isinstance(route, Route)
        kinds[route.kind] += 1
        return route

    router._decide = counted  # type: ignore[method-assign]
    rng, now_s, jobs = random.Random(1), 0.0, []
    for index in range(160):
        now_s += rng.expovariate(rate_per_s)
        jobs.append(Job(index, now_s, 2_048, 128, 128))
    clients = [client for client in system.run(jobs).clients if client.status is ClientStatus.FINISHED]
    tpots = [client.tpot_s for client in clients if client.tpot_s is not None]
    ttft_p90_s = percentile([client.ttft_s for client in clients], 90)
    return Result(160 - len(clients), ttft_p90_s, percentile(tpots, 90), kinds)


@pytest.fixture(scope="module")
def colocated() -> Result:
    return run(0, 1e9)


def test_slow_transfers_cost_no_more_than_no_split(colocated: Result) -> None:
    """Half a GB/s: 537 ms for a prompt's KV, four prompts a second."""
    before = run(1, 0.5e9, by_cost=False)
    assert before.num_failed > 10, "the link is overrun: the fault is one"
    assert before.tpot_p90_s > 5 * colocated.tpot_p90_s
    after = run(1, 0.5e9)
    assert after.num_failed == colocated.num_failed == 0
    assert after.ttft_p90_s <= 1.3 * colocated.ttft_p90_s
    assert after.tpot_p90_s <= 1.3 * colocated.tpot_p90_s
    assert after.kinds["local_slow_pair"] > 140
    assert after.kinds["remote"] > 0, "tried from time to time, and in bursts of streams"


def test_slow_transfers_under_more_load() -> None:
    """The link carries what it can, and decode computes the rest."""
    colocated, split = run(0, 1e9, rate_per_s=8.0), run(1, 1e9, rate_per_s=8.0)
    assert split.num_failed == 0
    assert split.tpot_p90_s <= 1.05 * colocated.tpot_p90_s
    assert split.ttft_p90_s <= 1.05 * colocated.ttft_p90_s
    assert min(split.kinds["remote"], split.kinds["local_slow_pair"]) > 20


@pytest.mark.parametrize("rate_per_s", [4.0, 8.0])
def test_with_fast_transfers_all_is_as_it_was(rate_per_s: float) -> None:
    before, after = (run(1, 200e9, by_cost, rate_per_s) for by_cost in (False, True))
    assert before == after
    assert set(after.kinds) == {"remote"}
