"""Tells the metrics and the router how many replicas each pool is to have: Serve's controller is asked, where the
policy runs."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Mapping
from typing import Any

from cluster.config.root import Config
from cluster.monitoring.ingress_metrics import IngressMetrics

_PATIENCE_S = 10.0

logger = logging.getLogger(__name__)

_HASTE = 5


class ScalingTargets:
    """On the ingress's event loop. Asks only where something scales; other numbers are the config's."""

    def __init__(
        self,
        app_name: str,
        metrics: IngressMetrics,
        on_targets: Callable[[Mapping[str, int]], None] = lambda _: None,
        somebody_waits: Callable[[], bool] = lambda: False,
        interval_s: float = 5.0,
    ) -> None:
        """on_targets: told of replicas to have, by deployment. somebody_waits: for replicas; then it asks five times as
        often."""
        self._app_name, self._metrics, self._interval_s = app_name, metrics, interval_s
        self._on_targets, self._somebody_waits = on_targets, somebody_waits
        self._task: asyncio.Task[None] | None = None
        self._pools: list[str] = []

    def follow(self, config: Config) -> None:
        """These are the pools from now on."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._pools = list(config.pools.deployed())
        self._show({name: pool.first_replicas for name, pool in config.pools.deployed().items()})
        if config.autoscales:
            self._task = asyncio.create_task(self._run(), context=contextvars.Context())

    async def _run(self) -> None:
        while True:
            try:
                self._show(await _targets(self._app_name))
            except KeyError as error:  # the application is being taken down, or is not whole yet
                logger.info("a deployment has gone", extra={"event": "targets_unknown", "deployment": str(error)})
            except Exception as error:  # metrics stop no serving; the controller may be starting anew
                logger.warning("scaling targets unknown", extra={"event": "targets_unknown", "reason": repr(error)})
            await self._pause()

    async def _pause(self) -> None:
        """Until it is time again; somebody may come meanwhile who waits."""
        for _ in range(_HASTE):
            await asyncio.sleep(self._interval_s / _HASTE)
            if self._somebody_waits():
                return

    def _show(self, targets: Mapping[str, int]) -> None:
        for name in self._pools:
            self._metrics.desired_replicas.set(targets[name], pool=name)
        if "prefill" in self._pools and targets["decode"]:
            self._metrics.prefill_decode_ratio.set(targets["prefill"] / targets["decode"])
        self._on_targets(targets)


async def _targets(app_name: str) -> dict[str, int]:
    """By deployment, as Serve's controller has it."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    async with asyncio.timeout(_PATIENCE_S):
        # On a thread: without a GCS it blocks until Ray's own patience is over, and with it all that this ingress does.
        controller: Any = await asyncio.to_thread(ray.get_actor, SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
        details = await controller.get_serve_instance_details.remote()
    deployments = details["applications"][app_name]["deployments"]
    return {name: int(deployment["target_num_replicas"]) for name, deployment in deployments.items()}
