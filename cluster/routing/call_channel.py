"""One router's calls to one replica: a ZeroMQ DEALER socket (replicas/channels/call_server.py is the other end)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import struct
from collections.abc import Callable

import zmq

from replicas.channels.wire import MAX_MESSAGE_BYTES
from replicas.messages import CallAddress

logger = logging.getLogger(__name__)

# Any of them: what was sent may be lost.
_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED  # no call leaves this host before that
_CONNECT_TIMEOUT_MS = 3000
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 10_000  # a host that is silent for so long has gone; frozen processes are noticed by others


class ChannelBroken(Exception):
    """The replica could not be reached, or the connection ended. may_have_reached: what was called may have been begun;
    else it was not, nor will it be."""

    def __init__(self, detail: str, *, may_have_reached: bool = False) -> None:
        super().__init__(detail)
        self.may_have_reached = may_have_reached


class CallFailed(Exception):
    """The replica's answer is that something there failed; the text is the kind of error."""


class CallChannel:
    """Opened once, for any number of calls at a time; of no use once it is broken. One event loop; nothing blocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: CallAddress, on_broken: Callable[[], None]):
        """on_broken: called once, before the calls that wait fail. Raises ChannelBroken for an address that ZeroMQ
        can't use, or when it has no socket left; nothing of it remains then."""
        self._on_broken = on_broken
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}  # by request id
        self._loop = asyncio.get_running_loop()
        self._socket, self._monitor = _connect(context, address)
        self._is_open, self._was_up = True, False
        # In an empty context: what is called from here belongs to no HTTP request.
        empty = contextvars.Context()
        empty.run(self._loop.add_reader, self._socket, self._receive)
        empty.run(self._loop.add_reader, self._monitor, self._watch)
        # A descriptor tells of what comes after the socket was found empty (zmq_getsockopt(3), ZMQ_FD).
        empty.run(self._loop.call_soon, self._watch)

    async def call(self, request_id: str, payload: bytes) -> bytes:
        """The reply. Cancelling this cancels the call at the replica. Raises ChannelBroken, CallFailed.

        request_id: of a call that is not open already; payload: not empty.
        """
        name = request_id.encode("ascii")
        reply: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting[name] = reply
        try:
            self._send(name, payload)
            return await reply
        finally:
            if self._waiting.pop(name, None) is not None:  # cancelled, or not sent
                with contextlib.suppress(ChannelBroken):
                    self._send(name, b"")

    def close(self) -> None:
        """End the connection: the replica cancels what is open, and here it fails. Idempotent."""
        self._end(may_have_reached=True)

    def _end(self, *, may_have_reached: bool) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._socket)
        self._loop.remove_reader(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        waiting, self._waiting = self._waiting, {}
        for reply in waiting.values():
            if not reply.done():
                reply.set_exception(ChannelBroken("the connection has ended", may_have_reached=may_have_reached))

    def _send(self, *parts: bytes) -> None:
        if not self._is_open:
            raise ChannelBroken("the connection has ended")
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it has ended, and the monitor is about to say so
            raise ChannelBroken(str(error)) from error
        # Sending may use up the descriptor's one sign that something has come.
        self._receive()

    def _receive(self) -> None:
        """Take all that has come: the descriptor tells of it once."""
        while self._is_open:
            try:
                name, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = self._waiting.pop(name, None)
            if reply is None or reply.done():  # nobody waits any more, or the replica asks whether we are there
                continue
            if len(parts) == 1:
                reply.set_result(parts[0])
            else:
                reply.set_exception(CallFailed(parts[-1].decode("ascii", "replace") if parts else "no answer"))

    def _watch(self) -> None:
        """Take all that the monitor has told: that the connection is up, and what breaks it."""
        while self._is_open:
            try:
                event, *_ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if struct.unpack_from("=H", event) == (_UP,):
                self._was_up = True
            else:
                self._break()

    def _break(self) -> None:
        self._receive()  # what came before it broke counts
        self._on_broken()
        self._end(may_have_reached=self._was_up)


def _connect(
    context: zmq.Context[zmq.Socket[bytes]], address: CallAddress
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """(socket, monitor) of a connection that is on its way. Raises ChannelBroken."""
    opened: list[zmq.Socket[bytes]] = []
    try:
        opened.append(socket := context.socket(zmq.DEALER))
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = address.public_key.encode("ascii")
        socket.sndhwm = socket.rcvhwm = 0  # the router bounds the calls that are open
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.connect_timeout = socket.handshake_ivl = _CONNECT_TIMEOUT_MS
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS
        socket.ipv6 = True
        socket.linger = 0
        socket.reconnect_ivl = -1  # what waits to be sent must not reach the replica once it has failed here
        opened.append(monitor := socket.get_monitor_socket(_UP | _BROKEN))
        socket.connect(address.endpoint)
    except (zmq.ZMQError, ValueError) as error:
        # The error outlives this call, and with it all that it refers to: an open socket would block context.term().
        for one in opened:
            one.close(linger=0)
        raise ChannelBroken(f"cannot connect to {address.endpoint}: {error}") from error
    return socket, monitor
