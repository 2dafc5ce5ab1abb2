"""A replica died: whoever holds a lease for it, or waits for it, is told to let go now instead of at expiry."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Sequence

from cluster.routing.pool_client import PoolClient
from cluster.routing.pool_view import PoolView
from replicas.messages import ForgetPeerCall

logger = logging.getLogger(__name__)


class DeadReplicas:
    """On the router's event loop. timeout_s: of the call to each survivor."""

    def __init__(self, pools: Sequence[PoolClient], view: PoolView, timeout_s: float) -> None:
        self._pools, self._view, self._timeout_s = pools, view, timeout_s
        self._background: set[asyncio.Task[None]] = set()

    def found(self, replica_id: str) -> None:
        """It is known to be dead. Does not wait; once for each is enough, more do nothing."""
        task = asyncio.create_task(self._forget(replica_id), context=contextvars.Context())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _forget(self, replica_id: str) -> None:
        agent_name = self._view.forget(replica_id)
        if agent_name is None:
            return
        survivors = [(pool, name) for pool in self._pools for name in pool.replicas() if name != replica_id]
        await asyncio.gather(*(self._tell(pool, name, agent_name) for pool, name in survivors))

    async def _tell(self, pool: PoolClient, replica_id: str, agent_name: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await pool.submit(replica_id, ForgetPeerCall(agent_name))
        except Exception as error:  # its leases and waits expire by themselves, only later
            extra = {"event": "forget_failed", "replica": replica_id, "reason": repr(error)}
            logger.warning("forget_peer failed", extra=extra)
