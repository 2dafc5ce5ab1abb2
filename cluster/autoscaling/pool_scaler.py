"""How many replicas each deployment should have: pure, from what ingresses report, the rules and the time.

Both pools are decided together. Prefill is as large as the prompt tokens that arrive take, and those that wait to be
caught up with: within the objective for the first token, or the delay with which the pool grows, if that is longer.
Decode is as large as the memory of its requests, by projection until each ends, their number, and the objective for a
token's time take; a request that waits for memory counts. Where both scale, their ratio stays within bounds: the one
that falls short grows. A pool without replicas starts with the first request that waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cluster.autoscaling.scaling_rules import Delays, ScalingRules
from cluster.autoscaling.scaling_window import Need, ScalingWindow
from cluster.routing.demand_report import DemandReport, combined

# Time constant of the arrival rate: bursts shorter than that show as waiting prompts, not as a rate.
_RATE_TIME_S = 30.0
# Half of the time to the first token may pass in prefill's queue: admission, the prompt's own computing and the way to
# the client take the rest.
_QUEUE_SHARE = 0.5
# A step is to end somewhat before a token is due.
_STEP_SHARE = 0.9
# To shrink, the work must fit with so much to spare: no flapping at the edge between two numbers.
_MARGIN = 1.1
# How fast the shortest step seen is forgotten: another model or another machine may have come.
_FLOOR_TIME_S = 3600.0


@dataclass(frozen=True, slots=True)
class PoolState:
    """One deployment as Serve has it. bounds: fewest and most replicas."""

    target: int
    num_running: int
    bounds: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ScalerMemory:
    """What is remembered from one decision to the next."""

    at_s: float
    arrived: Mapping[str, float] = field(default_factory=dict)  # by ingress: its counter
    is_arriving: bool = False  # somebody came since the decision before
    arriving_tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0  # of one replica, last known
    shortest_step_s: float = 0.0
    replica_blocks: float = 0.0  # of a decode replica, last known
    windows: Mapping[str, ScalingWindow] = field(default_factory=dict)


def decide_replicas(
    now_s: float,
    reports: Mapping[str, DemandReport],
    rules: ScalingRules,
    pools: Mapping[str, PoolState],
    memory: ScalerMemory | None,
) -> tuple[dict[str, int], ScalerMemory]:
    """Replicas to have of each of `pools` ("prefill", "decode", "ingress": those that scale). reports: by ingress.

    Raises ValueError without reports.
    """
    demand = combined(list(reports.values()))
    memory = _observed(now_s, reports, demand, memory or ScalerMemory(now_s))
    needs = _needs(demand, rules, pools, memory)
    windows, targets = dict(memory.windows), {}
    for name, pool in pools.items():
        delays: Delays = getattr(rules, name)
        window = windows.get(name) or ScalingWindow.begin(now_s, pool.target)
        windows[name] = window = window.seen(now_s, needs[name], delays)
        targets[name] = window.decide(now_s, pool.target, needs[name], delays, pool.bounds)
    return targets, replace(memory, windows=windows)


def _observed(
    now_s: float, reports: Mapping[str, DemandReport], demand: DemandReport, memory: ScalerMemory
) -> ScalerMemory:
    """Rates brought up to now. The counter of an ingress not seen before says nothing yet."""
    elapsed_s = now_s - memory.at_s
    arrived = {name: report.arrived_prompt_tokens for name, report in reports.items()}
    rate, shortest_s = memory.arriving_tokens_per_s, memory.shortest_step_s
    num_new = sum(max(0, count - memory.arrived.get(name, count)) for name, count in arrived.items())
    if elapsed_s > 0.0:
        rate += (num_new / elapsed_s - rate) * -math.expm1(-elapsed_s / _RATE_TIME_S)
    step_s = demand.heard.decode_step_s
    if step_s > 0.0:
        forgetting = max(0.0, elapsed_s) / _FLOOR_TIME_S
        shortest_s = min(step_s, shortest_s + (step_s - shortest_s) * forgetting) if shortest_s else step_s
    return ScalerMemory(
        at_s=now_s,
        arrived=arrived,
        is_arriving=num_new > 0,
        arriving_tokens_per_s=rate,
        prefill_tokens_per_s=demand.heard.prefill_tokens_per_s or memory.prefill_tokens_per_s,
        shortest_step_s=shortest_s,
        replica_blocks=demand.heard.replica_blocks or memory.replica_blocks,
        windows=memory.windows,
    )


def _needs(
    demand: DemandReport, rules: ScalingRules, pools: Mapping[str, PoolState], memory: ScalerMemory
) -> dict[str, Need]:
    prefill = prompt_replicas(demand, rules, memory)
    decode = max(
        memory_replicas(demand, rules, memory),
        sequence_replicas(demand, rules),
        step_replicas(demand, rules, pools, memory),
        prefill if rules.is_colocated else 0.0,
    )
    if rules.may_scale_together:
        prefill, decode = max(prefill, rules.min_ratio * decode), max(decode, prefill / rules.max_ratio)
    # Where prompts are short, nobody may be seen waiting, though many came and were served.
    is_waiting = demand.coming_prompt_tokens > 0 or demand.num_held > 0 or memory.is_arriving
    return {
        "prefill": _need(prefill, is_waiting),
        "decode": _need(decode, demand.num_open > 0 or is_waiting),
        "ingress": _need(demand.num_open / rules.requests_per_ingress, True),
    }


def _need(num_replicas: float, is_busy: bool) -> Need:
    return Need(max(1, math.ceil(num_replicas)), max(1, math.ceil(num_replicas * _MARGIN)), is_busy)


def prompt_replicas(demand: DemandReport, rules: ScalingRules, memory: ScalerMemory) -> float:
    """For the prompt tokens that arrive, and to catch up with those that wait. 0 while no rate was ever measured."""
    rate = memory.prefill_tokens_per_s
    if rate <= 0.0:
        return 0.0
    arriving = memory.arriving_tokens_per_s / (rate * rules.prefill_utilization)
    # Whom a burst made wait is late already: to catch up for them within less than the pool takes to follow anything
    # would only buy replicas that come when the burst is over.
    catch_up_s = max(rules.ttft_s * _QUEUE_SHARE, rules.prefill.up_s)
    waiting = demand.waiting_prompt_tokens / (rate * catch_up_s)
    return max(arriving, waiting)


def memory_replicas(demand: DemandReport, rules: ScalingRules, memory: ScalerMemory) -> float:
    """For the KV blocks of all who were admitted, by projection, and of all who wait. 0 before a size is known."""
    if not memory.replica_blocks:
        return 0.0
    return (demand.heard.decode_blocks + demand.waiting_blocks) / (memory.replica_blocks * rules.decode_utilization)


def sequence_replicas(demand: DemandReport, rules: ScalingRules) -> float:
    """For the number of those who run, or wait there to run."""
    return demand.heard.decode_sequences / (rules.sequences_per_replica * rules.decode_utilization)


def step_replicas(
    demand: DemandReport, rules: ScalingRules, pools: Mapping[str, PoolState], memory: ScalerMemory
) -> float:
    """For the time of a token. More replicas shorten only what a step takes beyond the shortest one seen (the weights
    are read whatever the number of rows), so the rest is taken to be in proportion to the rows of a replica.
    """
    pool = pools.get("decode")
    room_s = rules.tpot_s * _STEP_SHARE - memory.shortest_step_s
    if pool is None or demand.heard.decode_step_s <= 0.0 or not is_tpot_possible(rules, memory):
        return 0.0
    return pool.num_running * (demand.heard.decode_step_s - memory.shortest_step_s) / room_s


def is_tpot_possible(rules: ScalingRules, memory: ScalerMemory) -> bool:
    """Whether any number of replicas meets the objective for a token's time: one row alone must be quick enough."""
    return memory.shortest_step_s < rules.tpot_s * _STEP_SHARE
