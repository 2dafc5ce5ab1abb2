"""Serve replicas with the methods and the metadata of the real ones, around nothing."""

from __future__ import annotations

import uuid
from typing import Any

from benchmarks.control_path.stub_engine import NUM_BLOCKS, StubDecodeEngine, stub_load
from replicas.channels.call_server import CallServer
from replicas.channels.listening import node_address
from replicas.channels.token_sender import TokenSender
from replicas.channels.wire import Decoder
from replicas.messages import (
    Call,
    CallStatus,
    ForgetPeerCall,
    GenerateCall,
    PrefillCall,
    PrefillReply,
    Pulse,
    PulseCall,
    ReplayCall,
    ReplayReply,
    Token,
    TransferPeer,
)

BLOCK_SIZE = 16


class StubDecodeReplica:
    """In place of replicas.serving.decode_replica.DecodeReplica."""

    def __init__(self, fingerprint: str, step_s: float) -> None:
        self._fingerprint = fingerprint
        self._replica_id, epoch = _own_id(), uuid.uuid4().hex[:12]
        self._epoch = epoch
        self._engine = StubDecodeEngine(TokenSender(self._replica_id, epoch), step_s)
        self._engine.start()
        decode: Decoder[Call[Any]] = Decoder(GenerateCall | PulseCall | ForgetPeerCall | ReplayCall)
        self._calls = CallServer(node_address(), decode, self._take, self._engine.cancel)
        self._calls.start()

    def _take(self, call: Call[Any]) -> Any:
        if isinstance(call, GenerateCall):
            return self._engine.generate(call)
        if isinstance(call, ReplayCall):
            return ReplayReply(tuple(self._engine.sender.replay(call.router_id, call.from_seq)))
        return _answer(call)

    def record_replica_metadata(self) -> dict[str, Any]:
        metadata = _metadata(self._replica_id, self._epoch, self._calls, _own_actor(), self._fingerprint)
        return metadata | {"channel_public_key": self._engine.sender.public_key}

    async def metrics_snapshot(self) -> tuple[str, list[Any]]:
        return self._replica_id, []


class StubPrefillReplica:
    """In place of replicas.serving.prefill_replica.PrefillReplica."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._replica_id, self._epoch = _own_id(), uuid.uuid4().hex[:12]
        decode: Decoder[Call[Any]] = Decoder(PrefillCall | PulseCall | ForgetPeerCall)
        self._calls = CallServer(node_address(), decode, _answer, lambda request_id: None)
        self._calls.start()

    def record_replica_metadata(self) -> dict[str, Any]:
        return _metadata(self._replica_id, self._epoch, self._calls, _own_actor(), self._fingerprint)

    async def metrics_snapshot(self) -> tuple[str, list[Any]]:
        return self._replica_id, []

    async def nothing(self, payload: bytes) -> None:
        """What one Serve call of this size costs."""


def _answer(call: Call[Any]) -> Pulse | PrefillReply | None:
    if isinstance(call, PulseCall):
        return Pulse(stub_load(), 0.0)
    if isinstance(call, PrefillCall):
        token_id = call.spec.prompt_ids[0]
        first_tokens = tuple(Token(call.request_id, choice, 0, token_id, None) for choice in call.spec.choices)
        return PrefillReply(CallStatus.OK, "", first_tokens, 0.0, 0.0, stub_load())
    return None


def _own_id() -> str:
    from ray import serve

    replica_id: str = serve.get_replica_context().replica_id.unique_id
    return replica_id


def _own_actor() -> str | None:
    import ray

    name: str | None = ray.get_runtime_context().get_actor_name()
    return name


def _metadata(
    replica_id: str, epoch: str, calls: CallServer[Any, Any], actor_name: str | None, fingerprint: str
) -> dict[str, Any]:
    """As BuiltEngine.metadata. Its address is as long as NIXL's on one host: it travels in every call."""
    peer = TransferPeer(
        replica_id=replica_id,
        epoch=epoch,
        agent_name=f"{replica_id}-{epoch}",
        address=bytes(500),
        fingerprint=fingerprint,
        num_blocks=NUM_BLOCKS,
        block_bytes=1,
    )
    return {
        "peer": peer.to_metadata(),
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "kv_bytes_per_token": 1,
        "calls": calls.address.to_metadata(),
        "actor": actor_name,
    }
