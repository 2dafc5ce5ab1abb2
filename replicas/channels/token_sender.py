"""The decode side of the token channels: one ZeroMQ PUSH socket per router, encrypted and authenticated by CURVE."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from replicas.channels.frame_ring import FrameRing
from replicas.channels.wire import encode
from replicas.messages import ChannelAddress, EngineLoad, Frame, PromptLogprobs, Token

logger = logging.getLogger(__name__)

# Frames handed to ZeroMQ beyond what the router has read. Small: what waits here is lost when the connection breaks
# (and then replayed); what waits in the ring is not.
SEND_HIGH_WATER_MARK = 64
# Frames handed to ZeroMQ in one flush, however long the backlog: a step waits for this.
MAX_FRAMES_PER_FLUSH = 64
# How many closed channels' numbering is remembered.
MAX_CLOSED = 1024
# Of one replay. The router asks for the next when it finds that something is missing still.
REPLAY_BYTES = 4 << 20
HEARTBEAT_MS = 1000
# A peer whose host vanished without closing the connection is noticed after the stall deadline and this. Not before
# the deadline: a router that stopped reading does not answer heartbeats either, and on each new connection ZeroMQ
# would take a thousand frames more for it, so that it would never look stalled.
HEARTBEAT_MARGIN_S = 5.0
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
# ZeroMQ gives up for good on a connection that was refused (a router that does not know our key yet).
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
RETRY_REFUSED_S = 0.5


class FrameGone(Exception):
    """replay() was asked for frames that are no longer, or were never, kept. oldest_seq is what there still is."""

    def __init__(self, router_id: str, from_seq: int, oldest_seq: int) -> None:
        super().__init__(router_id, from_seq, oldest_seq)
        self.router_id = router_id
        self.from_seq = from_seq
        self.oldest_seq = oldest_seq

    def __str__(self) -> str:
        return f"frames for router {self.router_id} from {self.from_seq} are gone; the oldest kept is {self.oldest_seq}"


@dataclass(slots=True)
class _Channel:
    """One router. Frames that its ring calls sent were handed to ZeroMQ."""

    address: ChannelAddress
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]  # events of the socket: only REFUSED
    ring: FrameRing
    blocked_since_s: float | None = None
    refused_s: float | None = None


class TokenSender:
    """Sends frames to routers in order, without ever blocking.

    Owned by the engine's thread: every method is called there, except `replay` and `owes_tokens`.

    A frame that a channel cannot take now (not connected yet, router too slow) stays in the channel's ring and goes out
    before any later one, at the next `send` or `flush`. The ring also keeps sent frames for `replay`, and is bounded by
    those. What is not sent is never dropped: a router that has more than unsent_bytes to come counts as stalled.
    """

    def __init__(
        self,
        replica_id: str,
        epoch: str,
        *,
        stall_deadline_s: float = 10.0,
        ring_frames: int = 2048,
        ring_bytes: int = 8 << 20,
        unsent_bytes: int = 64 << 20,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica_id = replica_id
        self._epoch = epoch
        self._stall_deadline_s = stall_deadline_s
        self._ring_frames = ring_frames
        self._ring_bytes = ring_bytes
        self._unsent_bytes = unsent_bytes
        self._now_s = now_s
        self._context = zmq.Context()
        self._public_key, self._secret_key = zmq.curve_keypair()
        self._channels: dict[str, _Channel] = {}
        # Next seq of closed channels: if the router comes back, the numbering goes on, or it would take new frames for
        # old ones. In order of closing.
        self._closed: dict[ChannelAddress, int] = {}
        # Guards _channels and the rings against readers on other threads; never held while sending.
        self._lock = threading.Lock()

    @property
    def public_key(self) -> str:
        """Z85 text, for the replica's metadata: routers admit only published keys."""
        return self._public_key.decode("ascii")

    @property
    def has_unsent(self) -> bool:
        """Whether some frame waits in a ring: then call flush() soon, even when there is nothing new to send."""
        return any(channel.ring.has_unsent for channel in self._channels.values())

    @property
    def owes_tokens(self) -> bool:
        """Whether a frame that a request waits for has not left. Frames with nothing but load concern nobody here when
        this replica, or their router, ends. Any thread."""
        with self._lock:
            return any(channel.ring.owes_items for channel in self._channels.values())

    def open(self, address: ChannelAddress) -> None:
        """Start connecting to a router; does nothing when that very channel is open.

        Sequence numbers start at 0, or go on where a closed channel to the same address ended. Raises ValueError for
        an address that ZeroMQ cannot use.
        """
        existing = self._channels.get(address.router_id)
        if existing is not None and existing.address == address:
            return
        ends = self._connect(address)  # first: if it raises, the channel that there is goes on
        self.close(address.router_id)
        ring = FrameRing(self._closed.pop(address, 0), self._ring_frames, self._ring_bytes)
        channel = _Channel(address, *ends, ring)
        with self._lock:
            self._channels[address.router_id] = channel

    def send(
        self,
        router_id: str,
        load: EngineLoad,
        admitted: Sequence[str] = (),
        tokens: Sequence[Token] = (),
        prompts: Sequence[PromptLogprobs] = (),
        cached: Sequence[tuple[str, int]] = (),
        drafted: Sequence[tuple[str, int, int]] = (),
    ) -> int:
        """Queue one frame and send what can be sent. Returns the frame's seq. Raises KeyError: no such channel open."""
        channel = self._channels[router_id]
        seq = channel.ring.next_seq
        items = (tuple(admitted), tuple(tokens), tuple(prompts), tuple(cached), tuple(drafted))
        payload = encode(Frame(self._replica_id, self._epoch, seq, load, *items))
        with self._lock:
            channel.ring.keep(payload, is_owed=bool(admitted or tokens or prompts))
        self._flush(channel)
        return seq

    def flush(self) -> None:
        """Send what waits, where it can be sent."""
        for channel in self._channels.values():
            self._flush(channel)

    def replay(self, router_id: str, from_seq: int) -> list[bytes]:
        """The encoded frames for this router from from_seq on, until they are more than REPLAY_BYTES. Any thread; does
        not block. Raises FrameGone."""
        with self._lock:
            channel = self._channels.get(router_id)
            if channel is None:
                raise FrameGone(router_id, from_seq, 0)
            if not channel.ring.oldest_seq <= from_seq <= channel.ring.next_seq:
                raise FrameGone(router_id, from_seq, channel.ring.oldest_seq)
            return channel.ring.payloads(from_seq, REPLAY_BYTES)

    def stalled_routers(self, now_s: float) -> list[str]:
        """Routers whose channel has taken nothing for longer than the deadline while frames waited for it, or for which
        more waits than is kept."""
        return [
            router_id
            for router_id, channel in self._channels.items()
            if (channel.blocked_since_s is not None and now_s - channel.blocked_since_s > self._stall_deadline_s)
            or channel.ring.num_unsent_bytes > self._unsent_bytes
        ]

    def close(self, router_id: str) -> None:
        """Forget a router, with what it has not read. Unknown ids are fine."""
        with self._lock:
            channel = self._channels.pop(router_id, None)
        if channel is None:
            return
        _close(channel, linger_ms=0)
        self._closed[channel.address] = channel.ring.next_seq
        if len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]

    def shut_down(self, linger_s: float = 1.0) -> None:
        """Close every channel. Blocks for up to linger_s while sent frames leave this host."""
        self.flush()
        with self._lock:
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            _close(channel, linger_ms=int(linger_s * 1000))
        self._context.term()

    def _connect(self, address: ChannelAddress) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """(socket, monitor) of a connection that is on its way. Raises ValueError, and leaves nothing open then."""
        opened: list[zmq.Socket[bytes]] = []
        try:
            opened.append(socket := self._context.socket(zmq.PUSH))
            socket.curve_publickey = self._public_key
            socket.curve_secretkey = self._secret_key
            socket.curve_serverkey = address.public_key.encode("ascii")
            socket.sndhwm = SEND_HIGH_WATER_MARK
            # Without this a frame would be taken for a connection that may never come about.
            socket.immediate = True
            socket.ipv6 = True
            socket.heartbeat_ivl = HEARTBEAT_MS
            socket.heartbeat_timeout = int((self._stall_deadline_s + HEARTBEAT_MARGIN_S) * 1000)
            socket.reconnect_ivl = RECONNECT_MS
            socket.reconnect_ivl_max = RECONNECT_MAX_MS
            opened.append(monitor := socket.get_monitor_socket(REFUSED))
            socket.connect(address.endpoint)
        except (zmq.ZMQError, ValueError, TypeError) as error:
            for one in opened:  # the error may be kept, and sockets with it: they would block the context's end
                one.close(linger=0)
            raise ValueError(f"cannot open a token channel to {address}: {error}") from error
        return socket, monitor

    def _flush(self, channel: _Channel) -> None:
        # Only this thread changes the ring: reading it needs no lock.
        for _ in range(MAX_FRAMES_PER_FLUSH):
            payload = channel.ring.first_unsent
            if payload is None:
                return
            try:
                channel.socket.send(payload, zmq.NOBLOCK)
            except zmq.Again:
                if channel.blocked_since_s is None:
                    channel.blocked_since_s = self._now_s()
                self._reconnect_if_refused(channel)
                return
            with self._lock:
                channel.ring.sent()
            channel.blocked_since_s = None

    def _reconnect_if_refused(self, channel: _Channel) -> None:
        if channel.refused_s is None and channel.monitor.poll(0):
            event = recv_monitor_message(channel.monitor, zmq.NOBLOCK)
            channel.refused_s = self._now_s()
            logger.warning(
                "token channel: router %s refused us (%s)", channel.address.router_id, zmq.Event(event["event"]).name
            )
        if channel.refused_s is None or self._now_s() - channel.refused_s < RETRY_REFUSED_S:
            return
        try:
            ends = self._connect(channel.address)
        except ValueError as error:  # no descriptor is free, for example: later, or it is stalled by then
            logger.warning("token channel: %s", error)
            channel.refused_s = self._now_s()
            return
        _close(channel, linger_ms=0)
        channel.socket, channel.monitor = ends
        channel.refused_s = None


def _close(channel: _Channel, linger_ms: int) -> None:
    channel.socket.disable_monitor()
    channel.monitor.close(linger=0)
    channel.socket.close(linger=linger_ms)
