"""Sends a Serve call to the one replica that its caller named.

The target travels as the handle option `session_id`, so it stays out of the method's arguments. Overrides
`_choose_replica_for_request` because Serve's public hook matches waiting requests by an id that concurrent
calls of one HTTP request share, and then spins for ever (shared measurement; Ray is pinned, CI covers this).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter

from cluster.routing import replica_registry
from cluster.routing.target_lost import ReplicaDied, ReplicaGone, ReplicaUnreachable

_FULL_REPLICA_RETRY_S = 0.005
_MAX_DIED = 256  # of those that died last, by name: somebody may still ask


class TargetRouter(PowerOfTwoChoicesRequestRouter):
    """Calls without a target go where Serve's default would send them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]
        self._unreachable: set[str] = set()  # replicas that a call has just failed to reach
        self._died: deque[str] = deque(maxlen=_MAX_DIED)

    def on_replica_actor_unavailable(self, replica_id: Any) -> None:
        """Serve's hook. It would try the call again and again until the controller has found the replica dead."""
        super().on_replica_actor_unavailable(replica_id)
        self._unreachable.add(replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Serve's hook, on Ray's word. It takes the replica off the list, where those that leave are not any more."""
        super().on_replica_actor_died(replica_id)
        self._died.append(replica_id.unique_id)

    def update_replicas(self, replicas: list[Any]) -> None:
        """Serve's hook: the pool's running replicas changed."""
        super().update_replicas(replicas)
        table = {replica.replica_id.unique_id: replica.replica_metadata for replica in replicas}
        self._unreachable &= table.keys()
        # Through the module: this class is pickled by value, and an object imported from it would be a copy.
        replica_registry.REGISTRY.update(self._deployment_id.name, table)

    async def _choose_replica_for_request(self, pending_request: Any, *, is_retry: bool = False) -> Any:
        target = pending_request.metadata.session_id
        if not target:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if is_retry:
            if target in self._unreachable:
                self._unreachable.discard(target)
                raise ReplicaUnreachable(target)
            await asyncio.sleep(_FULL_REPLICA_RETRY_S)  # the replica was full (max_ongoing_requests)
        for replica in self._replicas_list:
            if replica.replica_id.unique_id == target:
                return replica
        raise ReplicaDied(target) if target in self._died else ReplicaGone(target)
