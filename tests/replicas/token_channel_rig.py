"""Both ends of a token channel, and strangers, on the loopback address: for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import zmq

from replicas.channels.token_receiver import TokenReceiver
from replicas.channels.token_sender import TokenSender
from replicas.messages import ChannelAddress, EngineLoad, Frame, Token

LOAD = EngineLoad(1, 2, 3, 4, 5, 0.006)
PATIENCE_S = 120.0


class Router:
    """The owner of a receiver: records what it is told."""

    def __init__(self, router_id: str = "router") -> None:
        self.frames: list[Frame] = []
        self.gaps: list[tuple[str, str, int]] = []
        self.receiver = TokenReceiver(
            router_id,
            "127.0.0.1",
            self.frames.append,
            lambda replica, epoch, seq: self.gaps.append((replica, epoch, seq)),
        )

    @property
    def seqs(self) -> list[int]:
        return [frame.seq for frame in self.frames]


@asynccontextmanager
async def running_router(router_id: str = "router") -> AsyncIterator[Router]:
    router = Router(router_id)
    await router.receiver.start()
    try:
        yield router
    finally:
        await router.receiver.stop()


@contextmanager
def running_sender(replica_id: str = "decode", epoch: str = "e1", **options: float) -> Iterator[TokenSender]:
    sender = TokenSender(replica_id, epoch, **options)  # type: ignore[arg-type]
    try:
        yield sender
    finally:
        sender.shut_down(linger_s=0)


async def until(condition: Callable[[], bool], *senders: TokenSender, within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        for sender in senders:
            sender.flush()
        await asyncio.sleep(0.002)


def items(count: int, start: int = 0) -> tuple[Token, ...]:
    return tuple(Token(f"request-{i}", 0, start, i, None) for i in range(count))


def frame_of(seq: int, replica_id: str = "decode", epoch: str = "e1") -> Frame:
    return Frame(replica_id, epoch, seq, LOAD, (), items(1, seq), (), (), ())


@contextmanager
def raw_push(address: ChannelAddress, keys: tuple[bytes, bytes] | None) -> Iterator[zmq.Socket[bytes]]:
    """A client with these CURVE keys (public, secret), or without encryption."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = keys
        socket.curve_serverkey = address.public_key.encode()
    socket.connect(address.endpoint)
    try:
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


@contextmanager
def raw_sender(router: Router) -> Iterator[Callable[[bytes], None]]:
    """Sends any bytes over an admitted connection."""
    keys = zmq.curve_keypair()
    router.receiver.allow(keys[0].decode())
    with raw_push(router.receiver.address, keys) as socket:
        yield socket.send
