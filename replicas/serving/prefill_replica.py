"""The Serve replica around a prefill engine. No decisions here."""

from __future__ import annotations

from replicas.messages import PrefillCall, PrefillReply
from replicas.serving.engine_replica import EngineReplica


class PrefillReplica(EngineReplica[PrefillCall, PrefillReply]):
    """Prompts in, first tokens out; the KV stays under a lease for a decode replica to read."""

    calls = PrefillCall
