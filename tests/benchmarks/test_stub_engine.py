"""The stub engine speaks the real protocol: its frames pass the real receiver, its load and metadata are whole."""

from __future__ import annotations

import asyncio

from benchmarks.control_path.stub_engine import StubDecodeEngine, stub_load
from benchmarks.control_path.stub_replicas import _answer, _metadata
from replicas.channels.call_server import CallServer
from replicas.channels.token_receiver import TokenReceiver
from replicas.channels.token_sender import TokenSender
from replicas.channels.wire import Decoder
from replicas.messages import (
    CallAddress,
    CallStatus,
    FinishReason,
    Frame,
    GenerateCall,
    GenerationSpec,
    PrefillCall,
    TransferPeer,
)
from scheduler.sampling_params import SamplingParams


async def test_tokens_arrive_in_order_and_are_counted() -> None:
    frames: list[Frame] = []
    receiver = TokenReceiver("router", "127.0.0.1", frames.append, lambda *_: None)
    await receiver.start()
    engine = StubDecodeEngine(TokenSender("decode", "epoch"), step_s=0.001)
    receiver.allow(engine.sender.public_key)
    engine.start()
    spec = GenerationSpec((42, 7), (0,), 5, frozenset(), SamplingParams(temperature=0.0))
    call = GenerateCall("r", spec, 10.0, receiver.address, None)
    reply = await asyncio.wait_for(asyncio.wrap_future(engine.generate(call)), 120)
    async with asyncio.timeout(120):
        # Behind it there may be one that only says that it is idle: where this process stood still both come together.
        while not (last := [frame for frame in frames if any(item.finish_reason for item in frame.tokens)]):
            await asyncio.sleep(0.001)
    await receiver.stop()
    assert reply.status is CallStatus.OK
    assert reply.num_tokens_sent == ((0, 4),)
    assert frames[0].admitted == ("r",)
    items = [item for frame in frames for item in frame.tokens]
    assert [(item.index, item.token_id) for item in items] == [(1, 42), (2, 42), (3, 42), (4, 42)]
    assert items[-1].finish_reason is FinishReason.LENGTH
    assert [frame.load for frame in last] == [stub_load(num_running=1, step_s=0.001)]


def test_metadata_is_what_the_router_reads() -> None:
    server = CallServer("127.0.0.1", Decoder(PrefillCall), _answer, lambda request_id: None)
    metadata = _metadata("decode-1", "epoch", server, "actor-1", "stub")
    server.stop()
    assert CallAddress(**metadata["calls"]) == server.address
    assert TransferPeer.from_metadata(metadata["peer"]).replica_id == "decode-1"
    assert metadata["actor"] == "actor-1"
    assert metadata["num_blocks"] > 0
