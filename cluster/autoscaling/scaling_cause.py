"""Why a pool grows or shrinks, in a few words. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.autoscaling.pool_scaler import (
    PoolState,
    ScalerMemory,
    memory_replicas,
    prompt_replicas,
    sequence_replicas,
    step_replicas,
)
from cluster.autoscaling.scaling_rules import ScalingRules
from cluster.routing.demand_report import DemandReport


def scaling_cause(
    name: str,
    num_replicas: int,
    demand: DemandReport,
    rules: ScalingRules,
    pools: Mapping[str, PoolState],
    memory: ScalerMemory,
) -> str:
    """Of the pool `name`, which is to have so many replicas now. demand: of all ingresses; memory: as it was after the
    decision."""
    if num_replicas == 0:
        return "no work for it"
    if num_replicas < pools[name].target:
        is_idle = not (demand.num_open or demand.num_held)
        return "no work" if is_idle else "what there is to do fits into fewer"
    if not pools[name].target:
        held = int(demand.num_held)
        return f"{_counted(held, 'request waits', 'requests wait')} for a first replica" if held else "there is work"
    if name == "ingress":
        return _counted(int(demand.num_open), "request is open", "requests are open")
    if name == "prefill":
        return _prefill(demand, rules, memory)
    return _decode(demand, rules, pools, memory)


def _prefill(demand: DemandReport, rules: ScalingRules, memory: ScalerMemory) -> str:
    if not prompt_replicas(demand, rules, memory):
        return "the pools' ratio"
    if demand.waiting_prompt_tokens:
        return f"{demand.waiting_prompt_tokens:.0f} prompt tokens waiting"
    return f"{memory.arriving_tokens_per_s:.0f} prompt tokens a second arriving"


def _decode(demand: DemandReport, rules: ScalingRules, pools: Mapping[str, PoolState], memory: ScalerMemory) -> str:
    """By what most replicas are needed for."""
    heard = demand.heard
    if demand.waiting_blocks:
        blocks = f"{demand.waiting_blocks:.0f} KV blocks waiting"
    else:
        blocks = f"{heard.decode_blocks:.0f} KV blocks promised"
    causes = {
        blocks: memory_replicas(demand, rules, memory),
        f"{heard.decode_sequences:.0f} sequences": sequence_replicas(demand, rules),
        f"a token takes {1000 * heard.decode_step_s:.0f} ms": step_replicas(demand, rules, pools, memory),
        _prefill(demand, rules, memory): prompt_replicas(demand, rules, memory) if rules.is_colocated else 0.0,
    }
    cause = max(causes, key=lambda of: causes[of])
    return cause if causes[cause] else "the pools' ratio"


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
