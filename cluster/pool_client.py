"""Calls to the replicas of one pool, each to a named one."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from cluster.replica_registry import ReplicaTable


class ReplicaLost(Exception):
    """The replica died or left before it answered: the call may be tried on another.

    is_dead: its process has ended. has_left: it is leaving its pool, and nothing was begun there. is_unreachable: it
    could not be reached, dead or not.
    """

    def __init__(
        self, replica_id: str, detail: str, is_dead: bool, has_left: bool = False, is_unreachable: bool = False
    ) -> None:
        super().__init__(replica_id, detail, is_dead, has_left, is_unreachable)
        self.replica_id, self.detail = replica_id, detail
        self.is_dead, self.has_left, self.is_unreachable = is_dead, has_left, is_dead or is_unreachable

    def __str__(self) -> str:
        return f"replica {self.replica_id}: {self.detail}"


class PoolClient(ABC):
    """One pool as the router sees it."""

    @abstractmethod
    def replicas(self) -> ReplicaTable:
        """Replica id -> published metadata, of the replicas that take work now."""

    @abstractmethod
    async def call(self, replica_id: str, method: str, *arguments: Any) -> Any:
        """The method's result. Cancelling this cancels the method at the replica.

        Raises ReplicaLost, also when somebody else cancelled it there; and whatever the method raised.
        """


class ServePool(PoolClient):
    """A pool behind a Serve handle whose deployment routes by `TargetRouter`."""

    def __init__(self, handle: Any, deployment: str) -> None:
        self._handle = handle
        self._deployment = deployment

    def replicas(self) -> ReplicaTable:
        from cluster import replica_registry

        return replica_registry.REGISTRY.replicas(self._deployment)

    async def call(self, replica_id: str, method: str, *arguments: Any) -> Any:
        from ray.exceptions import ActorDiedError, RayActorError

        from cluster.target_router import ReplicaGone

        response = self._handle.options(session_id=replica_id, method_name=method).remote(*arguments)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Serve's word for a method that was cancelled at the replica. Passed on, it would end our own task.
            raise ReplicaLost(replica_id, "the call was cancelled there", is_dead=False) from None
        except ReplicaGone as error:
            raise ReplicaLost(replica_id, str(error), is_dead=False, has_left=True) from error
        except RayActorError as error:
            is_dead = isinstance(error, ActorDiedError)
            raise ReplicaLost(replica_id, type(error).__name__, is_dead, is_unreachable=True) from error
