"""The Serve replica around a decode engine: RPC in, results out, health. No decisions here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replicas.engine_replica import EngineReplica, reply_or_cancel
from replicas.messages import CallStatus, Frame, GenerateCall, GenerateReply
from replicas.settings import EngineSettings

if TYPE_CHECKING:
    from replicas.decode_engine import DecodeEngine
    from replicas.engine_builder import BuiltEngine


class DecodeReplica(EngineReplica["DecodeEngine"]):
    """Also the whole system's only replica when colocated."""

    def _build(self, settings: EngineSettings, replica_id: str) -> BuiltEngine[DecodeEngine]:
        from replicas.engine_builder import build_decode_engine

        return build_decode_engine(settings, replica_id)

    def record_replica_metadata(self) -> dict[str, Any]:
        return {**super().record_replica_metadata(), "channel_public_key": self._engine.sender.public_key}

    async def generate(self, call: GenerateCall) -> GenerateReply:
        """One long call per request; its tokens travel by the token channel. Cancelling it frees all it holds."""
        if self.is_leaving:
            return GenerateReply(CallStatus.LEAVING, "the replica drains", (), 0.0, 0.0, 0.0)
        return await reply_or_cancel(self._engine.generate(call), self._engine.cancel, call.request.request_id)

    async def replay(self, router_id: str, from_seq: int) -> list[Frame]:
        """Frames that a router missed."""
        return self._engine.replay(router_id, from_seq)
