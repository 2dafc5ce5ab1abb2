"""What a replica answers to each kind of call, over real sockets. Its engine and Serve's part of it are not made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from cluster.routing.call_channel import CallChannel, CallFailed
from replicas.channels.call_server import CallServer
from replicas.channels.token_sender import TokenSender
from replicas.channels.wire import Decoder, decode_frame, encode
from replicas.messages import (
    Call,
    CallStatus,
    ChannelAddress,
    EngineLoad,
    ForgetPeerCall,
    GenerateCall,
    GenerateReply,
    GenerationSpec,
    KeyPosition,
    PrefillCall,
    PrefillReply,
    Pulse,
    PulseCall,
    ReplayCall,
    ReplayReply,
    TransferPeer,
)
from replicas.recent_part import KEYS_IN_PART
from replicas.serving.decode_replica import DecodeReplica
from replicas.serving.engine_replica import EngineReplica
from replicas.serving.prefill_replica import PrefillReplica
from scheduler.recent_keys import RecentKeys
from scheduler.sampling_params import SamplingParams

LOAD = EngineLoad(1, 2, 3, 4, 5, 0.25)
SPEC = GenerationSpec((1,), (0,), 1, frozenset(), SamplingParams(temperature=0.0))
ABSENT = ChannelAddress("absent", "tcp://127.0.0.1:9", zmq.curve_keypair()[0].decode())
PEER = TransferPeer("r", "e", "agent", b"", "f", 1, 1)
GENERATE, PREFILL = GenerateCall("a", SPEC, 10.0, ABSENT, None), PrefillCall("a", SPEC, 10.0, PEER)
OK = GenerateReply(CallStatus.OK, "", (), 0.0, 0.0, 0.0)

Ask = Callable[[Call[Any], Any], Any]


@asynccontextmanager
async def calls_to(replica: EngineReplica[Any, Any, Any]) -> AsyncIterator[Ask]:
    """Asks as a router does; the reply is decoded as the type given."""
    server: CallServer[Any, Any] = CallServer("127.0.0.1", replica.decoder(), replica._take, lambda request_id: None)
    server.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = CallChannel(context, server.address, lambda: None)

    async def ask(call: Call[Any], kind: Any) -> Any:
        async with asyncio.timeout(120.0):
            return Decoder(kind)(await channel.call("call", encode(call)))

    try:
        yield ask
    finally:
        channel.close()
        context.term()
        server.stop()


def replica_of(kind: type[EngineReplica[Any, Any, Any]], engine: Any) -> tuple[Any, list[str]]:
    """One that has started, but for all that it would load; and the peers that it was told to forget."""
    forgotten: list[str] = []
    replica: Any = kind.__new__(kind)
    replica._engine = engine
    replica._engine.status = SimpleNamespace(load=LOAD)
    replica._built = SimpleNamespace(transfers=SimpleNamespace(forget_peer=forgotten.append), recent_keys=None)
    replica._watch = SimpleNamespace(stalled_s=1.5)
    replica._termination = SimpleNamespace(is_requested=False)
    replica._has_left = False
    return replica, forgotten


def done(reply: GenerateReply) -> Future[GenerateReply]:
    future: Future[GenerateReply] = Future()
    future.set_result(reply)
    return future


@pytest.mark.parametrize("is_leaving", [False, True])
async def test_one_that_leaves_refuses_requests_and_nothing_else(is_leaving: bool) -> None:
    sender = TokenSender("decode", "e1")
    engine = SimpleNamespace(generate=lambda call: done(OK), sender=sender)
    replica, forgotten = replica_of(DecodeReplica, engine)
    replica._termination.is_requested = is_leaving
    sender.open(ABSENT)
    for _ in range(3):
        sender.send("absent", LOAD)
    async with calls_to(replica) as ask:
        assert await ask(PulseCall(), Pulse) == Pulse(LOAD, 1.5)
        assert await ask(ForgetPeerCall("agent-1"), None) is None
        frames = (await ask(ReplayCall("absent", 1), ReplayReply)).frames
        assert [decode_frame(frame).seq for frame in frames] == [1, 2]
        reply = await ask(GENERATE, GenerateReply)
        assert reply.status is (CallStatus.LEAVING if is_leaving else CallStatus.OK)
    assert forgotten == ["agent-1"]
    replica._has_left = True  # nothing is to be ended
    sender.shut_down(linger_s=0.0)


async def test_frames_that_are_gone_are_none(caplog: pytest.LogCaptureFixture) -> None:
    sender = TokenSender("decode", "e1")
    replica, _ = replica_of(DecodeReplica, SimpleNamespace(sender=sender))
    async with calls_to(replica) as ask:
        assert await ask(ReplayCall("unknown", 0), ReplayReply) == ReplayReply(())
    assert [record.event for record in caplog.records if hasattr(record, "event")] == ["frames_gone"]
    replica._has_left = True
    sender.shut_down(linger_s=0.0)


async def test_a_prefill_replica_has_no_frames_and_decodes_no_request_of_another_kind() -> None:
    reply = PrefillReply(CallStatus.OK, "", (), 0.0, 0.0, LOAD)
    replica, _ = replica_of(PrefillReplica, SimpleNamespace(prefill=lambda call: reply))
    async with calls_to(replica) as ask:
        assert await ask(PREFILL, PrefillReply) == reply
        assert await ask(PulseCall(), Pulse) == Pulse(LOAD, 1.5)
        for call in (ReplayCall("router", 0), GENERATE):
            with pytest.raises(CallFailed, match="MalformedMessage"):
                await ask(call, ReplayReply)
    replica._has_left = True


async def test_who_asks_what_was_cached_since_is_told_part_by_part() -> None:
    log = RecentKeys("e7")
    replica, _ = replica_of(PrefillReplica, SimpleNamespace())
    async with calls_to(replica) as ask:
        assert (await ask(PulseCall(KeyPosition()), Pulse)).keys is None, "it caches nothing"
        replica._built.recent_keys = log
        for number in range(KEYS_IN_PART + 3):
            log.append(number.to_bytes(16, "little"))
        assert (await ask(PulseCall(), Pulse)).keys is None, "nobody asked"
        part = (await ask(PulseCall(KeyPosition()), Pulse)).keys
        assert part.numbers() == tuple(range(KEYS_IN_PART))
        assert (part.epoch, part.start, part.end) == ("e7", 0, KEYS_IN_PART + 3)
        part = (await ask(PulseCall(KeyPosition("e7", part.stop)), Pulse)).keys
        assert part.numbers() == (KEYS_IN_PART, KEYS_IN_PART + 1, KEYS_IN_PART + 2)
        part = (await ask(PulseCall(KeyPosition("e7", part.stop)), Pulse)).keys
        assert (part.numbers(), part.start, part.end) == ((), KEYS_IN_PART + 3, KEYS_IN_PART + 3)
        assert (await ask(PulseCall(KeyPosition("e6", 500)), Pulse)).keys.start == 0, "of an engine that is gone"
    replica._has_left = True
