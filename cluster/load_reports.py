"""Asks prefill replicas for their load when they have not told it for a while: other ingresses send them work too."""

from __future__ import annotations

import asyncio
import contextvars
import logging

from cluster.pool_client import PoolClient
from cluster.pool_view import PoolView
from replicas.messages import EngineLoad

logger = logging.getLogger(__name__)


class LoadReports:
    """On the router's event loop. Costs a call a second and silent replica; none where there is no choice."""

    def __init__(self, prefill: PoolClient, view: PoolView, interval_s: float = 1.0) -> None:
        self._prefill, self._view, self._interval_s = prefill, view, interval_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), context=contextvars.Context())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if len(self._prefill.replicas()) > 1:
                silent = self._view.silent_prefills(self._interval_s)
                await asyncio.gather(*(self._ask(replica_id) for replica_id in silent))

    async def _ask(self, replica_id: str) -> None:
        try:
            async with asyncio.timeout(self._interval_s):
                load: EngineLoad = await self._prefill.call(replica_id, "load")
        except Exception as error:  # whether it lives is found out by the calls that matter
            extra = {"event": "load_report_failed", "replica": replica_id, "reason": repr(error)}
            logger.warning("no load report", extra=extra)
            return
        self._view.heard_prefill(replica_id, load)
