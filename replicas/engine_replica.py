"""What the Serve replicas of both kinds of engine have in common: start, metadata, health, metrics, end."""

from __future__ import annotations

import asyncio
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from replicas.settings import EngineSettings

if TYPE_CHECKING:
    from replicas.engine import Engine
    from replicas.engine_builder import BuiltEngine
    from replicas.metric_set import FamilySnapshot

EngineT = TypeVar("EngineT", bound="Engine[Any, Any]")
ReplyT = TypeVar("ReplyT")


class EngineReplica(ABC, Generic[EngineT]):
    """Loads its engine in the constructor (blocks until it can serve)."""

    def __init__(self, settings: EngineSettings) -> None:
        # Imported here: a head node without torch must be able to import this module to deploy it.
        from ray import serve

        from replicas.structured_log import configure_logging

        configure_logging(settings.log_level, settings.log_format)
        self._built = self._build(settings, serve.get_replica_context().replica_id.unique_id)
        self._engine = self._built.engine
        # What was loaded and compiled stays for good. To look for garbage in it, now and then, held up a step of 13 ms by
        # 600 ms.
        gc.collect()
        gc.freeze()
        self._built.start()

    @abstractmethod
    def _build(self, settings: EngineSettings, replica_id: str) -> BuiltEngine[EngineT]:
        """The engine, not started. Imports the builder itself: it needs torch."""

    def record_replica_metadata(self) -> dict[str, Any]:
        """Hook of Ray Serve: pushed to every handle of this deployment, once the replica is ready."""
        return self._built.metadata()

    async def forget_peer(self, agent_name: str) -> None:
        """The router saw this replica of the other pool die: transfers from it are lost, leases held for it end."""
        self._built.transfers.forget_peer(agent_name)

    async def metrics_snapshot(self) -> tuple[str, list[FamilySnapshot]]:
        """This replica's id and its metrics, for the ingress that was asked for /metrics."""
        return self._built.peer.replica_id, self._built.metrics_snapshot()

    def check_health(self) -> None:
        self._built.check_health()

    def __del__(self) -> None:
        built = getattr(self, "_built", None)
        if built is not None:
            built.stop()


async def reply_or_cancel(future: Future[ReplyT], cancel: Callable[[str], None], request_id: str) -> ReplyT:
    """Wait for an engine's reply. Serve cancels the call when the client has gone: that frees all the request holds."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        cancel(request_id)
        raise
