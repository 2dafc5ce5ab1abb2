"""The Serve replica around a decode engine. No decisions here."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from replicas.engine_replica import EngineReplica
from replicas.messages import CallStatus, Frame, GenerateCall, GenerateReply


class DecodeReplica(EngineReplica[GenerateCall, GenerateReply]):
    """Also the whole system's only replica when colocated. Tokens travel by the token channel, not in replies."""

    call_type = GenerateCall

    def _begin(self, call: GenerateCall) -> Future[GenerateReply]:
        return self._engine.generate(call)

    def _refusal(self) -> GenerateReply:
        return GenerateReply(CallStatus.LEAVING, "the replica drains", (), 0.0, 0.0, 0.0)

    def record_replica_metadata(self) -> dict[str, Any]:
        return {**super().record_replica_metadata(), "channel_public_key": self._engine.sender.public_key}

    async def replay(self, router_id: str, from_seq: int) -> list[Frame]:
        """Frames that a router missed."""
        return await asyncio.to_thread(self._engine.replay, router_id, from_seq)
