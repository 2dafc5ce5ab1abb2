"""The Serve replica around a prefill engine. No decisions here."""

from __future__ import annotations

from concurrent.futures import Future

from replicas.messages import CallStatus, PrefillCall, PrefillReply
from replicas.serving.engine_replica import EngineReplica


class PrefillReplica(EngineReplica[PrefillCall, PrefillReply]):
    """Prompts in, first tokens out; the KV stays under a lease for a decode replica to read."""

    calls = PrefillCall

    def _begin(self, call: PrefillCall) -> Future[PrefillReply]:
        return self._engine.prefill(call)

    def _refusal(self) -> PrefillReply:
        return PrefillReply(CallStatus.LEAVING, "the replica drains", (), 0.0, 0.0, self._engine.status.load)
