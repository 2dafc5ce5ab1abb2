"""What can't be opened leaves nothing open: an error that somebody keeps must not block the end of a ZeroMQ context."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from cluster.routing.call_channel import CallChannel, ChannelBroken
from replicas.channels.call_server import CallServer
from replicas.channels.token_receiver import TokenReceiver
from replicas.channels.token_sender import TokenSender
from replicas.channels.wire import Decoder
from replicas.messages import CallAddress, ChannelAddress, GenerateCall

KEY = zmq.curve_keypair()[0].decode("ascii")
HERE = "tcp://127.0.0.1:1"
ADDRESSES = [("tcp://no such place", KEY), ("nothing://known", KEY), (HERE, "too short"), (HERE, "ü" * 40)]
NOT_OURS = "203.0.113.7"  # of RFC 5737: no machine has it


def ends(end: Callable[[], object]) -> bool:
    """Whether it returns, and not only once somebody closes what is open."""
    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    thread.join(60.0)
    return not thread.is_alive()


def open_descriptors() -> set[tuple[str, str]]:
    """Of this process: numbers, and what they are."""
    found = set[tuple[str, str]]()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of this very look
            found.add((entry.name, str(entry.readlink())))
    return found


@pytest.mark.parametrize(("endpoint", "key"), ADDRESSES, ids=range(len(ADDRESSES)))
async def test_a_call_channel_that_cannot_be_opened(endpoint: str, key: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    broken: list[str] = []
    with pytest.raises(ChannelBroken, match="cannot connect") as kept:
        CallChannel(context, CallAddress(endpoint, key), lambda: broken.append("broken"))
    assert ends(context.term)
    assert kept.value.__cause__ is not None
    assert not broken, "it was never open"


async def test_a_call_channel_without_a_socket_left() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 1)  # and it needs three
    with pytest.raises(ChannelBroken, match="cannot connect") as kept:
        CallChannel(context, CallAddress(HERE, KEY), lambda: None)
    assert ends(context.term)
    assert kept.value.__cause__ is not None


@pytest.mark.parametrize(("endpoint", "key"), ADDRESSES, ids=range(len(ADDRESSES)))
def test_a_token_sender_that_cannot_open(endpoint: str, key: str) -> None:
    sender = TokenSender("decode", "e1")
    with pytest.raises(ValueError, match="cannot open a token channel") as kept:
        sender.open(ChannelAddress("router", endpoint, key))
    assert ends(sender.shut_down)
    assert kept.value.__cause__ is not None


async def test_a_token_receiver_that_cannot_bind() -> None:
    receiver = TokenReceiver("router", NOT_OURS, lambda frame: None, lambda *gap: None)
    with pytest.raises(zmq.ZMQError) as kept:
        await receiver.start()
    assert receiver._authenticator is not None
    receiver._authenticator.stop()
    assert ends(receiver._context.term)
    await receiver.stop()
    assert kept.value.errno


def test_a_call_server_that_cannot_bind() -> None:
    """It has no owner yet that could stop it."""
    before = open_descriptors()
    with pytest.raises(zmq.ZMQError) as kept:
        CallServer(NOT_OURS, Decoder(GenerateCall), lambda call: None, print)  # type: ignore[arg-type, return-value]
    assert not open_descriptors() - before, "what others close meanwhile is theirs"
    assert kept.value.errno
