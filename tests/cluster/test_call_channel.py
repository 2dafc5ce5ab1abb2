"""A router's calls to a replica over real sockets: replies, ends from either side, strangers, and broken bytes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import zmq
from msgspec import structs

from cluster.routing.call_channel import CallChannel, CallFailed, ChannelBroken
from replicas.channels.call_server import CallServer
from replicas.channels.wire import (
    MAX_MESSAGE_BYTES,
    Decoder,
    MalformedMessage,
    NotSendable,
    encode,
    encode_scores,
)
from replicas.messages import (
    CallAddress,
    CallStatus,
    ChannelAddress,
    EngineLoad,
    FinishReason,
    GenerateCall,
    GenerateReply,
    GenerationSpec,
    PrefillCall,
    PrefillReply,
    Token,
    TransferPeer,
)
from scheduler.beam_search import BeamParams
from scheduler.sampling_params import SamplingParams
from scheduler.token_logprobs import PromptLogprobs, TokenLogprobs

HOST = "127.0.0.1"
WAIT_S = 120.0
SAMPLING = SamplingParams(0.5, 3, 0.9, 1 << 63, logit_bias=((4, -1.5),), bad_words=((1, 2), (3,)), num_logprobs=4)
BEAM = BeamParams(2, early_stopping="never")
SPEC = GenerationSpec((5, 6, 49151), (0, 1), 7, frozenset({2, 9}), SAMPLING, -3, "c", 1, BEAM, 2)
PEER = TransferPeer("r", "e", "agent", b"\x00\xff", "f", 10, 64)
CALL = GenerateCall("a1", SPEC, 1.5, ChannelAddress("router", "tcp://127.0.0.1:1", "key"), PEER)
LOAD = EngineLoad(1, 2, 3, 4, 5, 0.25, 1e5, (4, 3), 9)
REPLY = GenerateReply(CallStatus.OK, "", ((0, 3), (2, 1)), 0.1, 0.2, 0.3)
SCORED = TokenLogprobs(-0.5, ((7, -0.5), (8, -9999.0)))
FIRST = (Token("a1", 0, 0, 7, FinishReason.STOP, SCORED), Token("a1", 1, 0, 8, None))


@pytest.mark.parametrize(
    "message",
    [
        CALL,
        structs.replace(CALL, source=None, spec=replace(SPEC, beam=None, choices=(0, 2), stop_token_ids=frozenset())),
        PrefillCall("a1", SPEC, 1.5, PEER),
        REPLY,
        replace(REPLY, status=CallStatus.KV_LOST, detail="why: ü", num_tokens_sent=()),
        PrefillReply(
            CallStatus.OK, "", FIRST, 0.1, 0.2, LOAD,
            encode_scores(PromptLogprobs("r", 0, (None, SCORED))),
        ),
    ],
)  # fmt: skip
def test_what_is_sent_arrives_as_it_was(message: object) -> None:
    decoded = Decoder(type(message))(encode(message))
    assert decoded == message
    # The types too: 1 == True == 1.0.
    assert repr(decoded).replace("CheckedToken(", "Token(") == repr(message)


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (b"", "truncated"),
        (b"\x80\x04N.", "missing required field"),  # a pickle: an empty map, in msgpack
        (encode(REPLY), "missing required field `request_id`"),
        (encode({"request_id": "a1", "spec": {}, "channel": {}, "source": None}), "missing required field"),
        (encode(CALL).replace(b"a1", b"\xc3\x28"), "utf-8"),
        (encode(CALL)[:-1], "truncated"),
        (encode(CALL) + b"\0", "trailing"),
        (encode(structs.replace(CALL, source="peer")), "source"),  # type: ignore[arg-type]
        (encode(structs.replace(CALL, spec=replace(SPEC, prompt_ids=(1, "2")))), "prompt_ids[1]"),  # type: ignore[arg-type]
        (encode(CALL).replace(b"\xa5width\x02", b"\xa5width\x00"), "width must be at least 1"),
        (encode(CALL).replace(b"\xaamax_tokens\x07", b"\xaamax_tokens\x00"), "max_tokens is 0"),
        (encode(CALL).replace(b"\xa7choices\x92\x00\x01", b"\xa7choices\x92\x00\x00"), "choices are (0, 0)"),
    ],
)
def test_other_bytes_are_refused(payload: bytes, what: str) -> None:
    with pytest.raises(MalformedMessage) as refused:
        Decoder(GenerateCall)(payload)
    assert what in str(refused.value)


@pytest.mark.parametrize("change", [{"choice": -1}, {"index": -1}, {"token_id": 1 << 63}, {"request_id": "x" * 5000}])
def test_the_ranges_of_a_token_are_checked_in_replies_too(change: dict[str, Any]) -> None:
    reply = PrefillReply(CallStatus.OK, "", FIRST, 0.1, 0.2, LOAD)
    assert Decoder(PrefillReply)(encode(reply)) == reply
    bad = replace(reply, first_tokens=(FIRST[0]._replace(**change),))
    with pytest.raises(MalformedMessage, match=r"first_tokens\[0\]"):
        Decoder(PrefillReply)(encode(bad))


class Engine:
    """Holds every call until the test answers."""

    def __init__(self) -> None:
        self.calls: dict[str, Future[GenerateReply]] = {}
        self.cancelled: list[str] = []
        self.raises = False

    def start(self, call: GenerateCall) -> Future[GenerateReply]:
        if self.raises:
            raise RuntimeError("the prompt was a secret")
        self.calls[call.request_id] = Future()
        return self.calls[call.request_id]

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        future = self.calls.get(request_id)
        if future is not None and not future.done():
            future.set_result(replace(REPLY, status=CallStatus.CANCELLED))


@dataclass
class Rig:
    engine: Engine
    server: CallServer[GenerateCall, GenerateReply]


@pytest.fixture
def rig() -> Iterator[Rig]:
    engine = Engine()
    server = CallServer(HOST, Decoder(GenerateCall), engine.start, engine.cancel)
    server.start()
    yield Rig(engine, server)
    if server.thread.is_alive():
        server.stop()


@asynccontextmanager
async def opened(address: CallAddress) -> AsyncIterator[tuple[CallChannel, list[str]]]:
    """A channel, and a list that has something in it once the channel is broken."""
    broken: list[str] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = CallChannel(context, address, lambda: broken.append("broken"))
    try:
        yield channel, broken
    finally:
        channel.close()
        context.term()


def call_of(request_id: str) -> bytes:
    return encode(structs.replace(CALL, request_id=request_id))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_many_calls_are_answered_in_any_order(rig: Rig) -> None:
    names = [f"call-{i}" for i in range(100)]
    async with opened(rig.server.address) as (channel, broken):
        replies = [asyncio.ensure_future(channel.call(name, call_of(name))) for name in names]
        await until(lambda: len(rig.engine.calls) == len(names))
        await until(lambda: rig.server.num_open == len(names))  # the last one counts once its start has returned
        for i, name in reversed(list(enumerate(names))):
            rig.engine.calls[name].set_result(replace(REPLY, detail=f"{i}"))
        details = [Decoder(GenerateReply)(reply).detail for reply in await asyncio.gather(*replies)]
        assert details == [f"{i}" for i in range(len(names))]
        assert rig.server.num_open == 0
        assert not rig.engine.cancelled
        assert not broken


async def test_a_cancelled_call_is_cancelled_there_and_costs_others_nothing(rig: Rig) -> None:
    async with opened(rig.server.address) as (channel, _):
        gone = asyncio.ensure_future(channel.call("gone", call_of("gone")))
        stays = asyncio.ensure_future(channel.call("stays", call_of("stays")))
        await until(lambda: len(rig.engine.calls) == 2)
        gone.cancel()
        await until(lambda: rig.engine.cancelled)
        assert rig.engine.cancelled == ["gone"]
        rig.engine.calls["stays"].set_result(REPLY)
        assert Decoder(GenerateReply)(await stays) == REPLY
        await until(lambda: rig.server.num_open == 0)


async def test_failures_at_the_replica_are_named_but_not_told(rig: Rig) -> None:
    async with opened(rig.server.address) as (channel, broken):
        rig.engine.raises = True
        with pytest.raises(CallFailed, match=r"^RuntimeError$"):
            await channel.call("at-once", call_of("at-once"))
        rig.engine.raises = False
        later = asyncio.ensure_future(channel.call("later", call_of("later")))
        await until(lambda: "later" in rig.engine.calls)
        rig.engine.calls["later"].set_exception(ValueError("the prompt was a secret"))
        with pytest.raises(CallFailed, match=r"^ValueError$"):
            await later
        with pytest.raises(CallFailed, match=r"^MalformedMessage$"):
            await channel.call("malformed", b"\x80\x04N.")
        assert not broken
        assert rig.server.num_open == 0


async def test_what_cannot_be_sent_costs_no_other_call(rig: Rig) -> None:
    large = structs.replace(CALL, spec=replace(SPEC, prompt_ids=(1 << 30,) * (MAX_MESSAGE_BYTES // 5)))
    with pytest.raises(NotSendable, match="GenerateCall of 3"):
        encode(large)
    with pytest.raises(NotSendable):
        encode(structs.replace(CALL, spec=replace(SPEC, client="\ud800")))
    with pytest.raises(NotSendable):
        encode(structs.replace(CALL, spec=replace(SPEC, priority=1 << 64)))
    async with opened(rig.server.address) as (channel, broken):
        calls = {name: asyncio.ensure_future(channel.call(name, call_of(name))) for name in ("large", "odd", "good")}
        await until(lambda: len(rig.engine.calls) == 3)
        rig.engine.calls["large"].set_result(replace(REPLY, detail="x" * MAX_MESSAGE_BYTES))
        rig.engine.calls["odd"].set_result(replace(REPLY, detail="\ud800"))
        for name in ("large", "odd"):
            with pytest.raises(CallFailed, match=r"^NotSendable$"):
                await calls[name]
        rig.engine.calls["good"].set_result(REPLY)
        assert Decoder(GenerateReply)(await calls["good"]) == REPLY
        assert not broken
    assert rig.server.thread.is_alive()


async def test_a_server_ends_under_calls_that_keep_coming(rig: Rig) -> None:
    """It answers between them, and each call ends: with its reply, or as broken."""
    slow, has_answered = rig.engine.start, threading.Event()

    def start(call: GenerateCall) -> Future[GenerateReply]:
        time.sleep(0.002)
        if len(rig.engine.calls) == 800:  # however long this side takes to see the first answer
            has_answered.wait(WAIT_S)
        future = slow(call)
        future.set_result(REPLY)
        return future

    rig.server._start = start
    async with opened(rig.server.address) as (channel, _):
        calls = [asyncio.ensure_future(channel.call(f"c{i}", call_of(f"c{i}"))) for i in range(1000)]
        await until(lambda: any(call.done() for call in calls))
        assert len(rig.engine.calls) < 900, "the first is answered long before the last is begun"
        has_answered.set()
        await asyncio.to_thread(rig.server.stop)
        async with asyncio.timeout(WAIT_S):
            ends = await asyncio.gather(*calls, return_exceptions=True)
    assert not rig.server.thread.is_alive()
    answered = [end for end in ends if isinstance(end, bytes)]
    assert len(answered) == len(rig.engine.calls)
    assert all(isinstance(end, ChannelBroken) for end in ends if not isinstance(end, bytes))


async def test_closing_the_routers_end_fails_what_is_open(rig: Rig) -> None:
    async with opened(rig.server.address) as (channel, broken):
        call = asyncio.ensure_future(channel.call("a", call_of("a")))
        await until(lambda: "a" in rig.engine.calls)
        channel.close()
        with pytest.raises(ChannelBroken):
            await call
        assert not broken
    await until(lambda: rig.engine.cancelled)


async def test_a_router_that_goes_leaves_no_call_behind(rig: Rig) -> None:
    async with opened(rig.server.address) as (stays, _):
        kept = asyncio.ensure_future(stays.call("kept", call_of("kept")))
        async with opened(rig.server.address) as (goes, _):
            lost = asyncio.ensure_future(goes.call("lost", call_of("lost")))
            await until(lambda: len(rig.engine.calls) == 2)
        lost.cancel()
        await until(lambda: rig.engine.cancelled)
        assert rig.engine.cancelled == ["lost"]
        await until(lambda: rig.server.num_open == 1)
        rig.engine.calls["kept"].set_result(REPLY)
        await kept


_REPLICA = """
import sys, time
from concurrent.futures import Future
from replicas.channels.call_server import CallServer
from replicas.channels.wire import Decoder
from replicas.messages import GenerateCall
server = CallServer("127.0.0.1", Decoder(GenerateCall), lambda call: print("taken", flush=True) or Future(), print)
server.start()
print(server.address.endpoint, server.address.public_key, flush=True)
time.sleep(600)
"""


async def test_calls_fail_at_once_when_the_replicas_process_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", _REPLICA], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = CallAddress(*process.stdout.readline().split())
            async with opened(address) as (channel, broken):
                call = asyncio.ensure_future(channel.call("a", call_of("a")))
                assert await asyncio.to_thread(process.stdout.readline) == "taken\n"
                os.kill(process.pid, signal.SIGKILL)
                with pytest.raises(ChannelBroken) as lost:
                    async with asyncio.timeout(WAIT_S):
                        await call
                assert broken == ["broken"]
                assert lost.value.may_have_reached, "it was taken"
                with pytest.raises(ChannelBroken) as lost:
                    await channel.call("b", call_of("b"))
                assert not lost.value.may_have_reached
            async with opened(address) as (again, broken):  # nobody listens there any more
                with pytest.raises(ChannelBroken) as lost:
                    async with asyncio.timeout(WAIT_S):
                        await again.call("c", call_of("c"))
                assert broken == ["broken"]
                assert not lost.value.may_have_reached
        finally:
            process.kill()


async def test_replies_are_sent_before_a_server_ends(rig: Rig) -> None:
    async with opened(rig.server.address) as (channel, broken):
        call = asyncio.ensure_future(channel.call("last", call_of("last")))
        await until(lambda: "last" in rig.engine.calls)
        rig.engine.calls["last"].set_result(REPLY)
        await asyncio.to_thread(rig.server.stop)
        assert Decoder(GenerateReply)(await call) == REPLY
        await until(lambda: broken)


async def test_who_does_not_know_the_key_is_not_heard(rig: Rig) -> None:
    address = rig.server.address
    wrong = replace(address, public_key=zmq.curve_keypair()[0].decode("ascii"))
    async with opened(wrong) as (channel, _):
        with pytest.raises(ChannelBroken) as lost:
            async with asyncio.timeout(WAIT_S):
                await channel.call("a", call_of("a"))
        assert not lost.value.may_have_reached
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(address.endpoint)
        with suppress(zmq.Again):  # refused already: with nobody to send to it would wait for ever
            plain.send_multipart([b"a", call_of("a")], zmq.NOBLOCK)
        assert not await asyncio.to_thread(plain.poll, 300)
    assert not rig.engine.calls


async def test_other_parts_and_unknown_names_change_nothing(rig: Rig) -> None:
    async with opened(rig.server.address) as (channel, broken):
        channel._socket.send_multipart([b"a", b"b", b"c"])
        channel._socket.send_multipart([b"a"])
        channel._socket.send_multipart([b"\xff unknown", b""])
        call = asyncio.ensure_future(channel.call("good", call_of("good")))
        await until(lambda: "good" in rig.engine.calls)
        assert len(rig.engine.cancelled) == 1
        rig.engine.calls["good"].set_result(REPLY)
        assert Decoder(GenerateReply)(await call) == REPLY
        assert not broken


async def test_a_turn_that_fails_costs_no_call_and_turns_that_fail_for_ever_end_it_loudly(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What asks routers whether they are there fails, once and then always: `check_health` looks at the thread."""
    num_failures, how_often = 0, 1

    def failing() -> None:
        nonlocal num_failures
        rig.server._probe_s = 0.0
        if num_failures < how_often:
            num_failures += 1
            raise OSError(24, "Too many open files")

    monkeypatch.setattr(rig.server, "_probe", failing)
    rig.server._probe_s = 0.0
    async with opened(rig.server.address) as (channel, _):
        await until(lambda: num_failures)
        call = asyncio.create_task(channel.call("a", call_of("a")))
        await until(lambda: rig.engine.calls)
        rig.engine.calls["a"].set_result(REPLY)
        assert Decoder(GenerateReply)(await call) == REPLY
        assert rig.server.thread.is_alive()
        how_often = 1000
        await until(lambda: not rig.server.thread.is_alive())
    rig.server.stop()
    assert "the calls thread died" in caplog.records[-1].message
