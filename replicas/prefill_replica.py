"""The Serve replica around a prefill engine. No decisions here."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from replicas.engine_replica import EngineReplica
from replicas.messages import CallStatus, PrefillCall, PrefillReply
from replicas.settings import EngineSettings

if TYPE_CHECKING:
    from replicas.engine.prefill_engine import PrefillEngine
    from replicas.engine_builder import BuiltEngine


class PrefillReplica(EngineReplica["PrefillEngine", PrefillCall, PrefillReply]):
    """Prompts in, first tokens out; the KV stays under a lease for a decode replica to read."""

    calls = PrefillCall

    def _build(self, settings: EngineSettings, replica_id: str) -> BuiltEngine[PrefillEngine]:
        from replicas.engine_builder import build_prefill_engine

        return build_prefill_engine(settings, replica_id)

    def _begin(self, call: PrefillCall) -> Future[PrefillReply]:
        return self._engine.prefill(call)

    def _refusal(self) -> PrefillReply:
        return PrefillReply(CallStatus.LEAVING, "the replica drains", (), 0.0, 0.0, self._engine.status.load)
