"""The autoscaling policy's core on an injected clock: what grows, what shrinks, and what stays."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import pytest

from cluster.autoscaling.pool_scaler import PoolState, ScalerMemory, decide_replicas
from cluster.autoscaling.scaling_rules import ScalingRules, scaling_rules
from cluster.config.root import Config
from cluster.routing.demand_report import DemandReport, HeardFigures

UP_S, DOWN_S, ZERO_S = 10.0, 60.0, 30.0
POOL = {
    "kv_capacity_tokens": 4096,
    "autoscaling": {
        "min_replicas": 0,
        "max_replicas": 10,
        "upscale_delay_s": UP_S,
        "downscale_delay_s": DOWN_S,
        "downscale_to_zero_delay_s": ZERO_S,
    },
}
RULES = scaling_rules(Config.model_validate({"pools": {"prefill": POOL, "decode": POOL}}))
IDLE = DemandReport(0, 0, 0, 0, 0, 0, HeardFigures(0, 256, 0, 0.0, 1000.0))
BOUNDS = {"prefill": (0, 10), "decode": (0, 10), "ingress": (1, 1)}


@dataclass
class Clock:
    """Serve as far as the core sees it: targets are followed at once. changes: (time, pool, from, to)."""

    targets: dict[str, int]
    rules: ScalingRules = RULES
    bounds: dict[str, tuple[int, int]] = field(default_factory=lambda: dict(BOUNDS))
    now_s: float = 1000.0
    memory: ScalerMemory | None = None
    changes: list[tuple[float, str, int, int]] = field(default_factory=list)

    def run(self, seconds: float, demand: DemandReport, tokens_per_s: float = 0.0, tick_s: float = 0.5) -> None:
        """A demand that stays as it is, but that prompts arrive. From the counters of the run before, if any."""
        began_s = self.now_s
        arrived = self.memory.arrived["i"] if self.memory else 0.0
        while self.now_s < began_s + seconds:
            count = arrived + tokens_per_s * (self.now_s - began_s)
            self.tick({"i": replace(demand, arrived_prompt_tokens=count)})
            self.now_s += tick_s

    def tick(self, reports: dict[str, DemandReport]) -> None:
        pools = {name: PoolState(count, count, self.bounds[name]) for name, count in self.targets.items()}
        targets, self.memory = decide_replicas(self.now_s, reports, self.rules, pools, self.memory)
        for name, count in targets.items():
            if count != self.targets[name]:
                self.changes.append((self.now_s, name, self.targets[name], count))
        self.targets = targets


def clock(prefill: int = 1, decode: int = 1, rules: ScalingRules = RULES) -> Clock:
    return Clock({"prefill": prefill, "decode": decode, "ingress": 1}, rules)


def test_rules_and_reports_survive_the_way_through_serve_as_numbers() -> None:
    demand = DemandReport(3, 1000, 300, 200, 12, 1, HeardFigures(100, 256, 5, 0.02, 900.0))
    stats = RULES.to_stats() | demand.to_stats()
    assert all(type(value) is float for value in stats.values())
    assert ScalingRules.from_stats(stats) == RULES
    assert DemandReport.from_stats(stats) == demand
    with pytest.raises(KeyError):
        DemandReport.from_stats({"num_open": 1.0})


def test_prefill_follows_the_tokens_that_arrive() -> None:
    """1000 tokens a second and replica, to be used to 80 %: 3500 a second take 4.4 replicas."""
    system = clock()
    system.run(300, replace(IDLE, num_open=4, coming_prompt_tokens=100, waiting_prompt_tokens=100), tokens_per_s=3500)
    assert system.targets["prefill"] == 5
    # The whole way up; nothing within the delay, and no step down on it.
    assert system.changes[0][0] >= 1000 + UP_S
    assert [name for _, name, before, after in system.changes if after < before] == []


def test_prefill_follows_the_tokens_that_wait() -> None:
    """They are caught up with in as long as the pool takes to grow, 10 s, or in half of the time to the first token."""
    waits = replace(IDLE, num_open=90, coming_prompt_tokens=65_000, waiting_prompt_tokens=65_000)
    system = clock()
    system.run(UP_S + 2, waits)
    assert system.targets["prefill"] == 7
    system = clock(rules=replace(RULES, ttft_s=40.0))
    system.run(UP_S + 2, waits)
    assert system.targets["prefill"] == 4


def test_prompts_that_wait_for_memory_on_decode_do_not_grow_prefill() -> None:
    system = clock()
    system.run(60, replace(IDLE, num_open=90, coming_prompt_tokens=65_000, waiting_blocks=600))
    assert system.targets["decode"] == 3
    assert system.targets["prefill"] == 1


def test_a_burst_shorter_than_the_delay_changes_nothing() -> None:
    system = clock()
    for _ in range(5):
        system.run(UP_S - 2, replace(IDLE, num_open=9, coming_prompt_tokens=65_000, waiting_prompt_tokens=65_000))
        system.run(4, replace(IDLE, num_open=1, coming_prompt_tokens=10, waiting_prompt_tokens=10))
    assert system.changes == []


@pytest.mark.parametrize(
    ("demand", "replicas"),
    [
        (replace(IDLE, num_open=50, heard=replace(IDLE.heard, decode_blocks=900)), 5),  # 900 / (256 x 0.8)
        (replace(IDLE, num_open=50, waiting_blocks=500, heard=replace(IDLE.heard, decode_blocks=200)), 4),
        (replace(IDLE, num_open=90, heard=replace(IDLE.heard, decode_sequences=90)), 4),  # 90 / (32 x 0.8)
    ],
)
def test_decode_follows_memory_and_sequences(demand: DemandReport, replicas: int) -> None:
    system = clock()
    system.run(UP_S + 2, demand)
    assert system.targets["decode"] == replicas


def test_decode_follows_the_objective_for_a_token() -> None:
    """Rows cost what goes beyond the shortest step, 20 ms: 130 ms on 2 replicas, where 70 are allowed, take 3.7."""
    system = clock(decode=2)
    system.run(5, replace(IDLE, num_open=1, heard=replace(IDLE.heard, decode_sequences=1, decode_step_s=0.02)))
    system.run(UP_S + 2, replace(IDLE, num_open=20, heard=replace(IDLE.heard, decode_sequences=20, decode_step_s=0.15)))
    assert system.targets["decode"] == 4


def test_an_objective_that_no_number_of_replicas_meets_is_left_out() -> None:
    system = clock()
    slow = replace(IDLE.heard, decode_sequences=3, decode_step_s=0.4)
    system.run(300, replace(IDLE, num_open=3, heard=slow))
    assert system.targets["decode"] == 1


def test_the_pool_that_falls_short_of_the_ratio_grows() -> None:
    rules = replace(RULES, min_ratio=0.5, max_ratio=2.0)
    system = clock(rules=rules)
    system.run(UP_S + 2, replace(IDLE, num_open=50, heard=replace(IDLE.heard, decode_blocks=1200)))
    assert system.targets == {"prefill": 3, "decode": 6, "ingress": 1}
    system = clock(rules=rules)
    system.run(UP_S + 2, replace(IDLE, num_open=9, coming_prompt_tokens=65_000, waiting_prompt_tokens=65_000))
    assert system.targets == {"prefill": 7, "decode": 4, "ingress": 1}


def test_shrinks_to_the_most_that_was_needed_lately_and_not_to_the_edge() -> None:
    system = clock(decode=6)
    busy = replace(IDLE, num_open=50, heard=replace(IDLE.heard, decode_blocks=1200))
    system.run(30, busy)
    less = replace(IDLE, num_open=20, heard=replace(IDLE.heard, decode_blocks=500))  # 2.44, 2.7 with the margin
    system.run(DOWN_S - 1, less)
    assert system.targets["decode"] == 6
    system.run(5, less)
    assert system.targets["decode"] == 3
    edge = replace(IDLE, num_open=20, heard=replace(IDLE.heard, decode_blocks=400))  # 1.95: 2 would be full
    system.run(DOWN_S + 5, edge)
    assert system.targets["decode"] == 3


def test_the_last_replica_goes_without_work_and_comes_back_at_once() -> None:
    system = clock(prefill=2)
    system.run(5, replace(IDLE, num_open=1, coming_prompt_tokens=5, waiting_prompt_tokens=5))
    system.run(DOWN_S + ZERO_S + 2, IDLE)
    assert system.targets == {"prefill": 0, "decode": 0, "ingress": 1}
    came_s = system.now_s
    # Nobody is there to be heard of: what was known of the pools is remembered.
    held = DemandReport(1, 0, 30_000, 30_000, 300, 1)
    system.run(1, held)
    assert system.targets == {"prefill": 3, "decode": 2, "ingress": 1}
    assert {change[0] for change in system.changes if change[2] == 0} == {came_s}


def test_short_prompts_that_nobody_sees_waiting_keep_prefill() -> None:
    system = clock()
    system.run(10 * ZERO_S, IDLE, tokens_per_s=3)
    assert system.targets["prefill"] == 1


def test_a_pool_that_may_not_be_empty_is_not() -> None:
    system = clock()
    system.bounds["decode"] = (1, 10)
    system.run(20 * ZERO_S, IDLE)
    assert system.targets["decode"] == 1


def test_bounds_hold() -> None:
    system = clock()
    system.bounds["decode"] = (2, 3)
    system.run(1, IDLE)
    assert system.targets["decode"] == 2
    system.run(UP_S + 2, replace(IDLE, num_open=500, heard=replace(IDLE.heard, decode_blocks=9000)))
    assert (system.targets["decode"], system.targets["ingress"]) == (3, 1)


def test_ingresses_follow_open_requests() -> None:
    system = clock(rules=replace(RULES, requests_per_ingress=100))
    system.bounds["ingress"] = (1, 4)
    system.run(RULES.ingress.up_s + 2, replace(IDLE, num_open=250))
    assert system.targets["ingress"] == 3


def test_an_ingress_that_comes_or_goes_is_no_burst() -> None:
    system = clock()
    old = replace(IDLE, num_open=1, coming_prompt_tokens=10, waiting_prompt_tokens=10, arrived_prompt_tokens=10_000_000)
    for second in range(300):
        reports = {"i": old} if 100 <= second < 200 else {"i": old, "j": old}
        system.tick(reports)
        system.now_s += 1.0
    assert system.changes == []


def test_without_a_report_there_is_nothing_to_decide() -> None:
    with pytest.raises(ValueError, match="no ingress"):
        decide_replicas(0.0, {}, RULES, {}, None)


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_load_changes_nothing_for_ten_minutes(seed: int) -> None:
    """Requests at random, Poisson, 400 prompt tokens each, 20 s on decode: after the first rise all stays."""
    rng = random.Random(seed)
    system, rate_per_s = clock(), 5.0
    ends: list[float] = []
    arrived, waiting, next_s = 0, 0.0, system.now_s
    settled_s = system.now_s + 120.0
    while system.now_s < settled_s + 600.0:
        while next_s <= system.now_s:
            arrived, waiting = arrived + 400, waiting + 400
            ends.append(next_s + rng.uniform(10, 30))
            next_s += rng.expovariate(rate_per_s)
        waiting = max(0.0, waiting - 0.5 * 1000 * system.targets["prefill"])
        ends = [end_s for end_s in ends if end_s > system.now_s]
        heard = HeardFigures(len(ends) * 8, 256, len(ends), 0.02 + 0.0005 * len(ends), 1000.0)
        system.tick({"i": DemandReport(len(ends), arrived, waiting, waiting, 0, 0, heard)})
        system.now_s += 0.5
    late = [change for change in system.changes if change[0] > settled_s]
    assert late == []
    assert system.targets["prefill"] >= math.ceil(rate_per_s * 400 / 800)
    assert system.targets["decode"] >= 4
