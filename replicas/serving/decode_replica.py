"""The Serve replica around a decode engine. No decisions here."""

from __future__ import annotations

from replicas.messages import GenerateCall, GenerateReply, MigrateCall, ReplayCall
from replicas.serving.engine_replica import EngineReplica


class DecodeReplica(EngineReplica[GenerateCall, GenerateReply]):
    """Also the whole system's only replica when colocated. Tokens travel by the token channel, not in replies."""

    calls = GenerateCall | ReplayCall | MigrateCall
