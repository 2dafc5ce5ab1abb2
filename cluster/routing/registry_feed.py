"""What Ray Serve knows of a pool's replicas, for `replica_registry`."""

from __future__ import annotations

from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter

from cluster.routing import replica_registry


class RegistryFeed(PowerOfTwoChoicesRequestRouter):
    """Serve's default router of calls, which hears of each change. Requests do not pass through it."""

    def update_replicas(self, replicas: list[Any]) -> None:
        """Serve's hook: the pool's running replicas changed."""
        super().update_replicas(replicas)
        table = {replica.replica_id.unique_id: replica.replica_metadata for replica in replicas}
        # Through the module: this class is pickled by value, and an object imported from it would be a copy.
        replica_registry.REGISTRY.update(self._deployment_id.name, table)
