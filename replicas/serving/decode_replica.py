"""The Serve replica around a decode engine. No decisions here."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

from replicas.channels.token_sender import FrameGone
from replicas.messages import Call, CallStatus, GenerateCall, GenerateReply, MigrateCall, ReplayCall, ReplayReply
from replicas.serving.engine_replica import EngineReplica

logger = logging.getLogger(__name__)


class DecodeReplica(EngineReplica[GenerateCall, GenerateReply]):
    """Also the whole system's only replica when colocated. Tokens travel by the token channel, not in replies."""

    calls = GenerateCall | ReplayCall | MigrateCall

    def _begin(self, call: GenerateCall) -> Future[GenerateReply]:
        return self._engine.generate(call)

    def _refusal(self) -> GenerateReply:
        return GenerateReply(CallStatus.LEAVING, "the replica drains", (), 0.0, 0.0, 0.0)

    def record_replica_metadata(self) -> dict[str, Any]:
        return {**super().record_replica_metadata(), "channel_public_key": self._engine.sender.public_key}

    def _take(self, call: Call[Any]) -> Any:
        if isinstance(call, MigrateCall):  # also of one that leaves: that is what it is for
            return self._engine.migrate(call)
        return self._replay(call) if isinstance(call, ReplayCall) else super()._take(call)

    def _replay(self, call: ReplayCall) -> ReplayReply:
        try:
            return ReplayReply(tuple(self._engine.sender.replay(call.router_id, call.from_seq)))
        except FrameGone as error:
            logger.warning("%s", error, extra={"event": "frames_gone", "router": call.router_id})
            return ReplayReply(())
