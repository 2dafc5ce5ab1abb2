"""The router's side of the token channels: one ZeroMQ PULL socket that only published decode replicas can send to."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from replicas.channels.listening import bind_free_port
from replicas.channels.wire import MAX_STREAMED_BYTES, MalformedMessage, decode_frame
from replicas.messages import ChannelAddress, Frame

logger = logging.getLogger(__name__)

ZAP_DOMAIN = b"splitserve-tokens"
# Frames of one replica kept behind a gap. More are dropped: that is one more gap, to be replayed.
MAX_HELD_FRAMES = 4096
# Streams that were forgotten and must stay so, as late frames of theirs may still arrive.
MAX_FORGOTTEN = 4096
# Taken without yielding: after so many frames, or bytes of them (milliseconds to decode), the event loop gets its turn.
FRAMES_PER_TURN = 64
BYTES_PER_TURN = 64 << 10

StreamKey = tuple[str, str]  # replica_id, epoch


@dataclass(slots=True)
class ReceiverCounts:
    """What did not go straight to on_frame, since the start."""

    malformed: int = 0
    unauthorized: int = 0  # of a key that is not allowed (any more), or in the name of another's replica
    duplicate: int = 0
    forgotten: int = 0
    held: int = 0
    overflowed: int = 0
    gaps: int = 0
    callback_errors: int = 0


@dataclass(slots=True)
class _Stream:
    """Frames of one (replica, epoch): next_seq is the next to hand on, held what arrived beyond a gap."""

    public_key: str
    next_seq: int = 0
    held: dict[int, Frame] = field(default_factory=dict)
    gap_reported: int = -1


class CurveAllowSet:
    """Which client keys may connect: the credentials provider of ZAP. Z85 text."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def callback(self, domain: str, key: bytes) -> bool:
        """ZAP's question; pyzmq fixes the name."""
        return key.decode("ascii") in self.keys


class TokenReceiver:
    """Receives frames in order, each once. Lives on one asyncio event loop; no method blocks it.

    Sequence numbers count from 0 per (decode engine, router), so the first frame of an engine must be number 0. Frames
    in order go to on_frame(frame). When one is missing, later ones are held back and on_gap(replica_id, epoch,
    from_seq) is called once; the owner then asks that replica to replay and calls deliver_replayed; if the frames are
    gone, it fails that replica's requests and calls skip_gap, or forget.

    Authentication is twofold: ZAP admits only connections of allowed keys, and each frame's key is checked again, so
    that `disallow` works at once and no replica can speak for another.
    """

    def __init__(
        self,
        router_id: str,
        host: str,
        on_frame: Callable[[Frame], None],
        on_gap: Callable[[str, str, int], None],
    ) -> None:
        """host: the address of this host that decode replicas reach it by; the port is a free one."""
        self._router_id = router_id
        self._host = host
        self._on_frame = on_frame
        self._on_gap = on_gap
        self._allowed = CurveAllowSet()
        self._streams: dict[StreamKey, _Stream] = {}
        self._forgotten: dict[StreamKey, None] = {}  # in order of insertion
        self._resumed: set[StreamKey] = set()  # were forgotten, and have sent nothing since they were taken back
        self.counts = ReceiverCounts()
        self._public_key, self._secret_key = zmq.curve_keypair()
        # A context of its own: ZAP has one handler per context.
        self._context = zmq.asyncio.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._endpoint = ""
        self._loop: asyncio.AbstractEventLoop | None = None  # while frames are being received
        self._next_turn: asyncio.Handle | None = None
        self._authenticator: AsyncioAuthenticator | None = None

    @property
    def address(self) -> ChannelAddress:
        """What decode replicas need to open their end. Only after start()."""
        assert self._socket is not None, "not started"
        return ChannelAddress(self._router_id, self._endpoint, self._public_key.decode("ascii"))

    async def start(self) -> None:
        """Bind and begin to receive. Raises zmq.ZMQError when the host's address cannot be bound."""
        # An empty context: tasks made inside a Serve request would be cancelled with it.
        empty = contextvars.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.configure_curve_callback(ZAP_DOMAIN.decode("ascii"), self._allowed)
        empty.run(self._authenticator.start)
        self._socket = self._bind()
        self._loop = asyncio.get_running_loop()
        empty.run(self._loop.add_reader, self._socket, self._receive, self._socket)

    async def stop(self) -> None:
        """Stop receiving and free the port. Frames not yet received are lost."""
        self._end_reception()
        if self._socket is not None:
            self._socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    @property
    def is_alive(self) -> bool:
        """Whether frames are being received, and replicas can connect: part of the router's health."""
        # What lets them in is a task that pyzmq keeps to itself, and that ends by whatever goes wrong in it.
        admission = getattr(self._authenticator, "_AsyncioAuthenticator__task", None)
        return self._loop is not None and not (admission is not None and admission.done())

    def allow(self, public_key: str) -> None:
        """Admit a decode replica, by the key in its metadata."""
        self._allowed.keys.add(public_key)

    def disallow(self, public_key: str) -> None:
        """From now on no connection and no frame of this key is taken."""
        self._allowed.keys.discard(public_key)

    def forget(self, replica_id: str, epoch: str) -> None:
        """This engine is gone or given up: its held frames are dropped, and so is whatever still arrives of it."""
        key = (replica_id, epoch)
        self._streams.pop(key, None)
        self._resumed.discard(key)
        self._forgotten[key] = None
        if len(self._forgotten) > MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]

    def resume(self, replica_id: str, epoch: str) -> None:
        """This engine is back: its frames are taken again, from whichever comes first. What it sent meanwhile is lost,
        so nobody may be waiting for it. Does nothing for one that was not forgotten.
        """
        key = (replica_id, epoch)
        if key in self._forgotten:
            del self._forgotten[key]
            self._resumed.add(key)

    def deliver_replayed(self, frames: Iterable[Frame]) -> None:
        """Frames that the replica replayed over a trusted call: they fill a gap; those already seen are dropped."""
        keys = set()
        for frame in frames:
            key = (frame.replica_id, frame.epoch)
            stream = self._streams.get(key)
            if stream is None:
                self.counts.forgotten += 1
            else:
                keys.add(key)
                self._accept(key, stream, frame)
        for key in keys:
            self._report_gap(key)

    def skip_gap(self, replica_id: str, epoch: str) -> None:
        """The missing frames cannot be had: go on with what is held. Only after failing what they may have carried."""
        key = (replica_id, epoch)
        stream = self._streams.get(key)
        if stream is not None and stream.held:
            stream.next_seq = min(stream.held)
            self._accept(key, stream, stream.held.pop(stream.next_seq))
            self._report_gap(key)

    def _bind(self) -> zmq.Socket[bytes]:
        # Not pyzmq's asyncio socket: that makes a future and a callback or two for each frame.
        socket: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PULL)
        try:
            socket.curve_server = True
            socket.curve_publickey = self._public_key
            socket.curve_secretkey = self._secret_key
            socket.zap_domain = ZAP_DOMAIN
            # If the ZAP handler were ever missing, nobody is admitted instead of everybody.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_STREAMED_BYTES)
            self._endpoint = bind_free_port(socket, self._host)
        except BaseException:
            socket.close(linger=0)  # the error may be kept, and the socket with it: it would block the context's end
            raise
        return socket

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        """Take the frames that are there. ZeroMQ's descriptor tells that something has changed, not that there is a
        frame, and tells it once: so this goes on until there is none (zmq_getsockopt(3), ZMQ_FD).
        """
        num_bytes = num_frames = 0
        try:
            while num_frames < FRAMES_PER_TURN and num_bytes < BYTES_PER_TURN:
                parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                num_frames += 1
                num_bytes += sum(len(part) for part in parts)
                self._guarded(partial(self._take, parts))
        except zmq.Again:
            return
        except Exception:
            logger.exception("token channel: reception has ended")
            self._end_reception()
            return
        assert self._loop is not None
        self._next_turn = self._loop.call_soon(self._receive, socket)

    def _end_reception(self) -> None:
        if self._loop is not None:
            assert self._socket is not None
            self._loop.remove_reader(self._socket)
            self._loop = None
        if self._next_turn is not None:
            self._next_turn.cancel()

    def _take(self, parts: list[zmq.Frame]) -> None:
        sender = str(parts[0].get("User-Id"))  # set by ZAP: the Z85 key that this connection proved to own
        if sender not in self._allowed.keys:
            self.counts.unauthorized += 1
            return
        try:
            if len(parts) != 1:
                raise MalformedMessage(f"{len(parts)} parts instead of 1")
            frame = decode_frame(parts[0].bytes)
        except MalformedMessage as error:
            self.counts.malformed += 1
            logger.warning("token channel: dropped a malformed frame: %s", error)
            return
        key = (frame.replica_id, frame.epoch)
        if key in self._forgotten:
            self.counts.forgotten += 1
            return
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream(sender, frame.seq if key in self._resumed else 0)
            self._resumed.discard(key)
        if stream.public_key != sender:
            self.counts.unauthorized += 1
            return
        self._accept(key, stream, frame)
        self._report_gap(key)

    def _accept(self, key: StreamKey, stream: _Stream, frame: Frame) -> None:
        """Hand on what is in order now, hold what is not. on_frame may call forget."""
        if frame.seq < stream.next_seq or frame.seq in stream.held:
            self.counts.duplicate += 1
        elif frame.seq > stream.next_seq:
            self._hold(stream, frame)
        else:
            following: Frame | None = frame
            while following is not None and self._streams.get(key) is stream:
                stream.next_seq += 1
                self._guarded(partial(self._on_frame, following))
                following = stream.held.pop(stream.next_seq, None)

    def _hold(self, stream: _Stream, frame: Frame) -> None:
        if len(stream.held) >= MAX_HELD_FRAMES:
            self.counts.overflowed += 1
        else:
            stream.held[frame.seq] = frame
            self.counts.held += 1

    def _report_gap(self, key: StreamKey) -> None:
        """Call on_gap, once for each gap, if frames of this stream are held back."""
        stream = self._streams.get(key)
        if stream is None or not stream.held or stream.gap_reported == stream.next_seq:
            return
        stream.gap_reported = missing = stream.next_seq
        self.counts.gaps += 1
        logger.warning("token channel: of replica %s frame %d is missing", key[0], missing)
        self._guarded(partial(self._on_gap, *key, missing))

    def _guarded(self, call: Callable[[], None]) -> None:
        """A fault in the handling of one frame, ours or the owner's, must not end the channel for all."""
        try:
            call()
        except Exception:
            self.counts.callback_errors += 1
            logger.exception("token channel: a callback failed")
