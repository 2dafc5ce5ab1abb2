"""The application-level autoscaling policy that a Serve config file names. It runs in Serve's controller.

Only an adapter: Serve's contexts in, numbers of replicas out; `pool_scaler` beside it decides. Ray carries this module
to the controller by value, and what it imports by name, so `cluster` must be importable there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from cluster.autoscaling.pool_scaler import PoolState, ScalerMemory, decide_replicas, is_tpot_possible
from cluster.autoscaling.scaling_cause import scaling_cause
from cluster.autoscaling.scaling_log import log_scaling
from cluster.autoscaling.scaling_rules import ScalingRules
from cluster.routing.demand_report import DemandReport, combined

logger = logging.getLogger("ray.serve")

_INTERVAL_S = 0.5
_MEMORY = "scaler"


def decide(contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
    """Replicas of each deployment, by its id, and what to remember. contexts: Serve's AutoscalingContext, by id.

    Called ten times a second; does not block. Where nothing is known (no ingress has reported) all stays as it is; an
    error is logged and changes nothing: it must not stop the controller.
    """
    targets = {key: context.target_num_replicas for key, context in contexts.items()}
    states = {key: dict(context.policy_state) for key, context in contexts.items()}
    ingress = next((key for key, context in contexts.items() if context.deployment_name == "ingress"), None)
    if ingress is None:
        return targets, states
    now_s: float = contexts[ingress].current_time
    memory: ScalerMemory | None = states[ingress].get(_MEMORY)
    if memory is not None and 0.0 <= now_s - memory.at_s < _INTERVAL_S:
        return targets, states
    try:
        reports = latest_reports(contexts[ingress])
        if reports:
            pools = {context.deployment_name: _pool_state(context) for context in contexts.values()}
            decided, states[ingress][_MEMORY] = _decide(now_s, reports, pools, memory)
            targets = {key: decided[context.deployment_name] for key, context in contexts.items()}
    except Exception:
        logger.exception("autoscaling: no decision was taken")
    return targets, states


def latest_reports(context: Any) -> dict[str, dict[str, float]]:
    """By ingress replica, its newest value of each figure. A replica that has told only a part is left out."""
    reports: dict[str, dict[str, float]] = {}
    for name, series_by_replica in (context.raw_metrics or {}).items():
        for replica_id, series in series_by_replica.items():
            if series:
                reports.setdefault(replica_id.unique_id, {})[name] = series[-1].value
    return {name: stats for name, stats in reports.items() if _is_whole(stats)}


def _is_whole(stats: Mapping[str, float]) -> bool:
    try:
        DemandReport.from_stats(stats)
        ScalingRules.from_stats(stats)
    except KeyError:
        return False
    return True


def _pool_state(context: Any) -> PoolState:
    bounds = (context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas)
    return PoolState(context.target_num_replicas, context.current_num_replicas, bounds)


def _decide(
    now_s: float,
    reports: Mapping[str, Mapping[str, float]],
    pools: Mapping[str, PoolState],
    memory: ScalerMemory | None,
) -> tuple[dict[str, int], ScalerMemory]:
    rules = ScalingRules.from_stats(next(iter(reports.values())))
    demands = {name: DemandReport.from_stats(stats) for name, stats in reports.items()}
    decided, after = decide_replicas(now_s, demands, rules, pools, memory)
    for name, num_replicas in decided.items():
        if num_replicas != pools[name].target:
            cause = scaling_cause(name, num_replicas, combined(list(demands.values())), rules, pools, after)
            log_scaling(name, pools[name].target, num_replicas, cause)
    was_possible = memory is None or is_tpot_possible(rules, memory)
    if was_possible and not is_tpot_possible(rules, after):
        logger.warning(
            "autoscaling: slo.tpot_s %g s cannot be met by any number of decode replicas, whose shortest step takes "
            "%.3f s: it is left out of the decision",
            rules.tpot_s,
            after.shortest_step_s,
        )
    return decided, after
