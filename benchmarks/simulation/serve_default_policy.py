"""Ray Serve's own autoscaling of a deployment, for comparison: its functions, over calls as it counts them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

from cluster.autoscaling.pool_scaler import PoolState
from cluster.routing.demand_report import DemandReport

_LOOK_BACK_S = 30.0  # AutoscalingConfig.look_back_period_s


class ServeDefaultPolicy:
    """Each pool by itself, by target_ongoing_requests. Imports Ray."""

    def __init__(self, targets: Mapping[str, float], upscale_delay_s: float, downscale_delay_s: float) -> None:
        from ray.serve.autoscaling_policy import _apply_autoscaling_config, default_autoscaling_policy

        self._decide = _apply_autoscaling_config(default_autoscaling_policy)
        self._targets = targets
        self._delays = {"upscale_delay_s": upscale_delay_s, "downscale_delay_s": downscale_delay_s}
        self._counts: dict[str, deque[tuple[float, int]]] = {name: deque() for name in targets}
        self._states: dict[str, dict[str, Any]] = {name: {} for name in targets}

    def decide(
        self,
        now_s: float,
        reports: Mapping[str, DemandReport],
        pools: Mapping[str, PoolState],
        ongoing: Mapping[str, int],
    ) -> Mapping[str, int]:
        return {name: self._decide_pool(name, pool, now_s, ongoing[name]) for name, pool in pools.items()}

    def _decide_pool(self, name: str, pool: PoolState, now_s: float, num_ongoing: int) -> int:
        counts = self._counts[name]
        counts.append((now_s, num_ongoing))
        while counts[0][0] <= now_s - _LOOK_BACK_S:
            counts.popleft()
        context = self._context(name, pool, now_s, sum(count for _, count in counts) / len(counts))
        # Its delays are measured on the wall clock, whatever the context says of the time.
        with mock.patch("ray.serve.autoscaling_policy.time", SimpleNamespace(time=lambda: now_s)):
            wanted, self._states[name] = self._decide(context)
        return max(pool.bounds[0], min(pool.bounds[1], math.ceil(wanted)))

    def _context(self, name: str, pool: PoolState, now_s: float, mean_ongoing: float) -> Any:
        from ray.serve._private.common import DeploymentID
        from ray.serve.config import AutoscalingConfig, AutoscalingContext

        least, most = pool.bounds
        config = AutoscalingConfig(
            min_replicas=least, max_replicas=most, target_ongoing_requests=self._targets[name], **self._delays
        )
        return AutoscalingContext(
            deployment_id=DeploymentID(name, "app"),
            deployment_name=name,
            app_name="app",
            current_num_replicas=pool.num_running,
            target_num_replicas=pool.target,
            running_replicas=[],
            total_num_requests=mean_ongoing,
            total_queued_requests=0.0,
            aggregated_metrics={},
            raw_metrics={},
            capacity_adjusted_min_replicas=least,
            capacity_adjusted_max_replicas=most,
            policy_state=dict(self._states[name]),
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=now_s,
            config=config,
        )


class StaticSplit:
    """Whatever happens."""

    def decide(
        self,
        now_s: float,
        reports: Mapping[str, DemandReport],
        pools: Mapping[str, PoolState],
        ongoing: Mapping[str, int],
    ) -> Mapping[str, int]:
        return {name: pool.target for name, pool in pools.items()}
