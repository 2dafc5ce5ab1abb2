"""`python -m benchmarks.control_path.streamed_replies`: tokens over the call connection against the token channel.

A spike: what it would cost to stream tokens as replies. Three ways, CURVE in all, a step every STEP_S, one token a
stream and step, one router:

    channel   today's: a frame a step, PUSH/PULL, with ring (token_sender.py, token_receiver.py)
    frames    a frame a step on the call connection, sent by the calls' thread
    replies   a reply a token, likewise

Neither of the last two keeps anything to send again, bounds what waits, or notices a router that does not read.
CPU time: of the engine's thread within its sends, of the router's event loop, of both processes with all their threads.
Delay: from the send to the router's loop, while the engine's thread is in Python for BUSY_S of each step, as with small
models; other threads of its process wait for the interpreter then.
"""

from __future__ import annotations

import asyncio
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

import zmq

from cluster.load.tables import table
from cluster.routing.call_channel import CallChannel
from replicas.channels.call_server import CallServer
from replicas.channels.token_receiver import TokenReceiver
from replicas.channels.token_sender import TokenSender
from replicas.channels.wire import Decoder, decode_frame, encode
from replicas.messages import (
    CallAddress,
    CallStatus,
    ChannelAddress,
    CheckedToken,
    EngineLoad,
    Frame,
    GenerateCall,
    GenerateReply,
    GenerationSpec,
    Token,
)
from scheduler.sampling_params import SamplingParams

Way = Literal["channel", "frames", "replies"]
WAYS: tuple[Way, ...] = ("channel", "frames", "replies")
NUM_STREAMS = (64, 256)
STEP_S = 0.007
BUSY_S = 0.004
NUM_STEPS = 400
_ROUNDS = 5
_LOAD = EngineLoad(64, 3, 1000, 500, 4000, 0.012, 12000.0, (400, 300, 200, 100), 180)
_FRAME = b"frame"
_DELAYS = ("delay, ms, p50", "p90")


# -- the replica's process -------------------------------------------------------------------------


class StreamingServer(CallServer[GenerateCall, GenerateReply]):
    """Sends what the engine's thread has put in, too. router: who called last."""

    router = b""

    def __init__(self, start: Callable[[GenerateCall], Future[GenerateReply]]) -> None:
        super().__init__("127.0.0.1", Decoder(GenerateCall), start, lambda request_id: None)
        self._streamed: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()

    def stream(self, parts: list[tuple[bytes, bytes]]) -> None:
        for part in parts:
            self._streamed.put(part)
        self._wake()

    def _take(self, router: bytes, parts: list[bytes]) -> None:
        self.router = router
        super()._take(router, parts)

    def _reply(self) -> None:
        super()._reply()
        while not self._streamed.empty():
            self._send(self.router, *self._streamed.get_nowait())


def replica(way: Way, num_streams: int) -> None:
    """Runs until all its tokens are sent; then says what it used."""
    sender = TokenSender("decode", "epoch")
    began: Future[GenerateCall] = Future()
    reply: Future[GenerateReply] = Future()
    server = StreamingServer(lambda call: began.set_result(call) or reply)  # type: ignore[func-returns-value]
    server.start()
    print(json.dumps([server.address.to_metadata(), sender.public_key]), flush=True)
    channel = began.result().channel
    sender.open(channel)
    used: list[tuple[float, float]] = []
    thread = threading.Thread(target=lambda: used.append(_engine(way, num_streams, sender, server, channel)))
    begun_s = time.process_time()
    thread.start()
    thread.join()
    reply.set_result(GenerateReply(CallStatus.OK, "", (), 0.0, 0.0, 0.0))
    ((used_s, busy_s),) = used
    print(json.dumps([used_s, time.process_time() - begun_s - busy_s]), flush=True)
    sys.stdin.readline()
    sender.shut_down()
    server.stop()


def _engine(
    way: Way, num_streams: int, sender: TokenSender, server: StreamingServer, channel: ChannelAddress
) -> tuple[float, float]:
    """CPU seconds of its sends, and of what it does besides."""
    names = [f"{i * 7919:032x}" for i in range(num_streams)]
    used_s, busy_s, next_s = 0.0, 0.0, time.monotonic()
    for step in range(NUM_STEPS):
        sent_us = int(time.monotonic() * 1e6)
        items = tuple(Token(name, 0, step, sent_us, None) for name in names)
        begun_s = time.thread_time()
        if way == "channel":
            sender.send(channel.router_id, _LOAD, (), items)
        elif way == "frames":
            server.stream([(_FRAME, encode(Frame("decode", "epoch", step, _LOAD, (), items, (), (), ())))])
        else:
            server.stream([(item.request_id.encode("ascii"), encode(item)) for item in items])
        used_s += time.thread_time() - begun_s
        begun_s, until_s = time.thread_time(), time.monotonic() + BUSY_S
        while time.monotonic() < until_s:
            pass
        busy_s += time.thread_time() - begun_s
        next_s = max(next_s + STEP_S, time.monotonic())
        time.sleep(max(0.0, next_s - time.monotonic()))
    while sender.has_unsent:
        sender.flush()
        time.sleep(0.001)
    return used_s, busy_s


# -- the router's process --------------------------------------------------------------------------


class StreamingChannel(CallChannel):
    """Hands on what comes beside replies."""

    on_part: Callable[[bytes, bytes], None]

    def _receive(self) -> None:
        while self._is_open:
            try:
                name, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if name in self._waiting:
                self._waiting.pop(name).set_result(parts[0])
            elif name:
                self.on_part(name, parts[0])


class Intake:
    """Counts tokens by stream, as the router sorts them. is_whole: done once all have come."""

    def __init__(self, num_streams: int) -> None:
        self.counts = dict.fromkeys((f"{i * 7919:032x}" for i in range(num_streams)), 0)
        self._first = next(iter(self.counts))
        self.is_whole = asyncio.get_running_loop().create_future()
        self.delays_us: list[float] = []  # of a step's first token
        self._num_to_come = num_streams * NUM_STEPS
        self._decode_item: Decoder[Token] = Decoder(CheckedToken)

    def on_frame(self, frame: Frame) -> None:
        self._take(*frame.tokens)

    def on_part(self, name: bytes, payload: bytes) -> None:
        if name == _FRAME:
            self.on_frame(decode_frame(payload))
        else:
            self._take(self._decode_item(payload))

    def _take(self, *items: Token) -> None:
        if items[0].request_id == self._first:
            self.delays_us.append(time.monotonic() * 1e6 - items[0].token_id)
        for item in items:
            self.counts[item.request_id] += 1
        self._num_to_come -= len(items)
        if not self._num_to_come:
            self.is_whole.set_result(None)


def measure(way: Way, num_streams: int) -> dict[str, float]:
    """CPU us a token: engine, loop, both processes; and the delay in ms."""
    command = [sys.executable, "-m", "benchmarks.control_path.streamed_replies", way, str(num_streams)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address, public_key = json.loads(process.stdout.readline())
        loop_s, router_s, delays_us = asyncio.run(_receive(CallAddress(**address), public_key, num_streams))
        engine_s, replica_s = json.loads(process.stdout.readline())
        process.communicate("\n")
    per_token = 1e6 / (num_streams * NUM_STEPS)
    cpu = {"engine": engine_s * per_token, "loop": loop_s * per_token, "all": (replica_s + router_s) * per_token}
    p50, p90 = (delays_us[len(delays_us) * percent // 100] for percent in (50, 90))
    return cpu | {"p50": p50 / 1000, "p90": p90 / 1000}


async def _receive(address: CallAddress, public_key: str, num_streams: int) -> tuple[float, float, list[float]]:
    """CPU seconds of this loop, and of this process; delays in order of size."""
    intake = Intake(num_streams)
    receiver = TokenReceiver("router", "127.0.0.1", intake.on_frame, lambda *_: None)
    await receiver.start()
    receiver.allow(public_key)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = StreamingChannel(context, address, lambda: None)
    channel.on_part = intake.on_part
    spec = GenerationSpec((1,), (0,), 9, frozenset(), SamplingParams(temperature=0.0))
    loop_s, process_s = time.thread_time(), time.process_time()
    await channel.call("call", encode(GenerateCall("call", spec, 60.0, receiver.address, None)))
    async with asyncio.timeout(30):
        await intake.is_whole
    loop_s, process_s = time.thread_time() - loop_s, time.process_time() - process_s
    assert set(intake.counts.values()) == {NUM_STEPS}
    channel.close()
    context.term()
    await receiver.stop()
    return loop_s, process_s, sorted(intake.delays_us)


def main() -> None:
    if len(sys.argv) > 1:
        way: Any = sys.argv[1]
        replica(way, int(sys.argv[2]))
        return
    rows = []
    for num_streams in NUM_STREAMS:
        found: dict[Way, list[dict[str, float]]] = {way: [] for way in WAYS}
        for round_ in range(_ROUNDS):
            for way in WAYS[round_ % 3 :] + WAYS[: round_ % 3]:
                found[way].append(measure(way, num_streams))
        for way, results in found.items():
            figures = [statistics.median(result[of] for result in results) for of in results[0]]
            rows.append([way, str(num_streams), *(f"{figure:.2f}" for figure in figures)])
    print(table(["way", "streams", "engine's thread, us a token", "router's loop", "both processes", *_DELAYS], rows))


if __name__ == "__main__":
    main()
