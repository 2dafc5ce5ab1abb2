"""The Serve replica around a prefill engine: RPC in, results out, health. No decisions here."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from replicas.messages import EngineLoad, PrefillCall, PrefillReply
from replicas.settings import EngineSettings

if TYPE_CHECKING:
    from replicas.engine_builder import BuiltEngine
    from replicas.metric_set import FamilySnapshot
    from replicas.prefill_engine import PrefillEngine


class PrefillReplica:
    """Loads its engine in the constructor (blocks until it can serve)."""

    def __init__(self, settings: EngineSettings) -> None:
        # Imported here: a head node without torch must be able to import this module to deploy it.
        from ray import serve

        from replicas.engine_builder import build_prefill_engine
        from replicas.structured_log import configure_logging

        configure_logging(settings.log_level, settings.log_format)
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._built: BuiltEngine[PrefillEngine] = build_prefill_engine(settings, replica_id)
        self._engine = self._built.engine
        self._built.start()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Hook of Ray Serve: pushed to every handle of this deployment, once the replica is ready."""
        return self._built.metadata()

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        """Compute one prompt. Cancelling the call (Serve does, when the client has gone) frees all it holds."""
        future = asyncio.wrap_future(self._engine.prefill(call))
        try:
            return await future
        except asyncio.CancelledError:
            self._engine.cancel(call.request.request_id)
            raise

    async def load(self) -> EngineLoad:
        """What waits here and how fast it is computed, not older than a step and 50 ms."""
        return self._engine.status.load

    async def forget_peer(self, agent_name: str) -> None:
        """The router saw this decode replica die: leases held for it end."""
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
