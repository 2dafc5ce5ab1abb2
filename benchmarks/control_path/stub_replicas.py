"""Serve replicas with the methods and the metadata of the real ones, around nothing."""

from __future__ import annotations

import uuid
from concurrent.futures import Future
from typing import Any

from benchmarks.control_path.stub_engine import NUM_BLOCKS, StubDecodeEngine, stub_load
from replicas.channels.call_server import CallServer
from replicas.channels.call_wire import Decoder
from replicas.channels.listening import node_address
from replicas.channels.token_sender import TokenSender
from replicas.messages import (
    CallStatus,
    FirstToken,
    Frame,
    GenerateCall,
    PrefillCall,
    PrefillReply,
    Pulse,
    TransferPeer,
)

BLOCK_SIZE = 16


class StubDecodeReplica:
    """In place of replicas.decode_replica.DecodeReplica."""

    def __init__(self, step_s: float) -> None:
        self._replica_id, epoch = _own_id(), uuid.uuid4().hex[:12]
        self._epoch = epoch
        self._engine = StubDecodeEngine(TokenSender(self._replica_id, epoch), step_s)
        self._engine.start()
        self._calls = CallServer(node_address(), Decoder(GenerateCall), self._engine.generate, self._engine.cancel)
        self._calls.start()

    def record_replica_metadata(self) -> dict[str, Any]:
        metadata = _metadata(self._replica_id, self._epoch, self._calls)
        return metadata | {"channel_public_key": self._engine.sender.public_key}

    async def replay(self, router_id: str, from_seq: int) -> list[Frame]:
        return self._engine.replay(router_id, from_seq)

    async def pulse(self) -> Pulse:
        return Pulse(stub_load(), 0.0)

    async def forget_peer(self, agent_name: str) -> None:
        pass

    async def metrics_snapshot(self) -> tuple[str, list[Any]]:
        return self._replica_id, []


class StubPrefillReplica:
    """In place of replicas.prefill_replica.PrefillReplica."""

    def __init__(self) -> None:
        self._replica_id, self._epoch = _own_id(), uuid.uuid4().hex[:12]
        self._calls = CallServer(node_address(), Decoder(PrefillCall), _prefill, lambda request_id: None)
        self._calls.start()

    def record_replica_metadata(self) -> dict[str, Any]:
        return _metadata(self._replica_id, self._epoch, self._calls)

    async def pulse(self) -> Pulse:
        return Pulse(stub_load(), 0.0)

    async def forget_peer(self, agent_name: str) -> None:
        pass

    async def metrics_snapshot(self) -> tuple[str, list[Any]]:
        return self._replica_id, []

    async def nothing(self, payload: bytes) -> None:
        """What one Serve call of this size costs."""


def _prefill(call: PrefillCall) -> Future[PrefillReply]:
    token_id = call.request.prompt_ids[0]
    first_tokens = tuple(FirstToken(choice, token_id, None) for choice in call.request.choices)
    future: Future[PrefillReply] = Future()
    future.set_result(PrefillReply(CallStatus.OK, "", first_tokens, 0.0, 0.0, stub_load()))
    return future


def _own_id() -> str:
    from ray import serve

    replica_id: str = serve.get_replica_context().replica_id.unique_id
    return replica_id


def _metadata(replica_id: str, epoch: str, calls: CallServer[Any, Any]) -> dict[str, Any]:
    """As BuiltEngine.metadata. Its address is as long as NIXL's on one host: it travels in every call."""
    peer = TransferPeer(
        replica_id=replica_id,
        epoch=epoch,
        agent_name=f"{replica_id}-{epoch}",
        address=bytes(500),
        fingerprint="stub",
        num_blocks=NUM_BLOCKS,
        block_bytes=1,
    )
    return {
        "peer": peer.to_metadata(),
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "kv_bytes_per_token": 1,
        "calls": calls.address.to_metadata(),
    }
