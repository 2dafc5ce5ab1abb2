"""The Serve replica around a prefill engine: RPC in, results out, health. No decisions here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.engine_replica import EngineReplica, reply_or_cancel
from replicas.messages import CallStatus, PrefillCall, PrefillReply
from replicas.settings import EngineSettings

if TYPE_CHECKING:
    from replicas.engine_builder import BuiltEngine
    from replicas.prefill_engine import PrefillEngine


class PrefillReplica(EngineReplica["PrefillEngine"]):
    """Prompts in, first tokens out; the KV stays under a lease for a decode replica to read."""

    def _build(self, settings: EngineSettings, replica_id: str) -> BuiltEngine[PrefillEngine]:
        from replicas.engine_builder import build_prefill_engine

        return build_prefill_engine(settings, replica_id)

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        """Compute one prompt. Cancelling the call (Serve does, when the client has gone) frees all it holds."""
        if self.is_leaving:
            return PrefillReply(CallStatus.LEAVING, "the replica drains", (), 0.0, 0.0, self._engine.status.load)
        return await reply_or_cancel(self._engine.prefill(call), self._engine.cancel, call.request.request_id)
