"""Takes the routers' calls and sends the replies: one ZeroMQ ROUTER socket and a thread of its own.

Not Serve calls, which take several times as long (docs/control-path.md). CURVE encrypts, and admits those who know the
replica's public key. The parts of a message:

    router -> replica   request id, call         replica -> router   request id, reply
                        request id, ""  (cancel)                     request id, "", what failed
                                                                     "", ""  (is anybody there?)
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

import zmq

from replicas.channels.listening import bind_free_port
from replicas.channels.wire import MAX_MESSAGE_BYTES, Decoder, MalformedMessage, encode
from replicas.messages import CallAddress

logger = logging.getLogger(__name__)

CallT = TypeVar("CallT")
ReplyT = TypeVar("ReplyT")

_PROBE_S = 1.0  # how often routers with open calls are asked whether they are there
_IDLE_MS = 250
_CALLS_PER_TURN = 32  # then replies and probes get their turn
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 10_000  # a router's host that is silent for so long has gone
_HANDSHAKE_MS = 3000  # who has not proved by then that it knows the key is disconnected
_LINGER_MS = 1000
_JOIN_S = 3.0
_MAX_FAILURES = 3  # turns in a row: then going on would be to go round for ever


class CallServer(Generic[CallT, ReplyT]):
    """start, cancel: called on this server's thread, so they must not block. What `start` returns is the reply, or its
    future, which may be done on any thread. When a router has gone, its calls are cancelled."""

    def __init__(
        self,
        host: str,
        decode: Decoder[CallT],
        start: Callable[[CallT], ReplyT | Future[ReplyT]],
        cancel: Callable[[str], None],
    ) -> None:
        """host: this host's address as routers know it; the port is a free one. Raises zmq.ZMQError when it can't be
        bound."""
        self._decode, self._start, self._cancel = decode, start, cancel
        self._open: defaultdict[bytes, set[bytes]] = defaultdict(set)  # request ids by router
        self._done: queue.SimpleQueue[tuple[bytes, bytes, Future[ReplyT]]] = queue.SimpleQueue()
        self._is_woken = False
        self._wakes, self._wake_end = socket.socketpair()
        self._wakes.setblocking(False)
        self._wake_end.setblocking(False)
        self._is_ending = False
        self._context = zmq.Context()
        self._public_key, secret_key = zmq.curve_keypair()
        try:
            self._socket, self._endpoint = self._bind(secret_key, host)  # the socket is its thread's, once that runs
        except BaseException:
            self._end_context()
            raise
        self._thread = threading.Thread(target=self._run, name="calls", daemon=True)
        self.last_beat_s = time.monotonic()
        self._probe_s = self.last_beat_s + _PROBE_S

    @property
    def address(self) -> CallAddress:
        return CallAddress(self._endpoint, self._public_key.decode("ascii"))

    @property
    def thread(self) -> threading.Thread:
        """For those that watch it."""
        return self._thread

    @property
    def num_open(self) -> int:
        """Calls whose reply is still to come. Any thread; one that has just come may not count yet."""
        return sum(len(ids) for ids in list(self._open.values()))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take nothing more, send the replies there are, free the port. Blocks for a moment, at most some seconds."""
        self._is_ending = True
        self._wake()
        if self._thread.ident is None:
            self._socket.close(linger=0)
        else:
            self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._end_context()

    def _end_context(self) -> None:
        """Its socket is closed."""
        self._context.term()
        self._wakes.close()
        self._wake_end.close()

    def _bind(self, secret_key: bytes, host: str) -> tuple[zmq.Socket[bytes], str]:
        """A socket and its endpoint. Raises zmq.ZMQError; it is closed then."""
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            router.curve_server = True
            router.curve_publickey = self._public_key
            router.curve_secretkey = secret_key
            router.router_mandatory = True  # tells when a router has gone
            # Nothing is dropped: a router bounds the calls it has open.
            router.sndhwm = router.rcvhwm = 0
            router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            router.heartbeat_ivl = _HEARTBEAT_MS
            router.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS
            router.handshake_ivl = _HANDSHAKE_MS
            return router, bind_free_port(router, host)
        except BaseException:
            router.close(linger=0)
            raise

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakes, zmq.POLLIN)
        num_failures = 0
        try:
            while not self._is_ending:
                try:
                    self._turn(poller)
                    num_failures = 0
                except Exception:
                    num_failures += 1
                    if num_failures >= _MAX_FAILURES:
                        raise
                    logger.exception("calls: a turn failed; the next one", extra={"event": "calls_failed"})
            self._reply()
        except Exception:  # `check_health` tells of it: the replica is replaced
            logger.critical("the calls thread died: nobody reaches this replica any more", exc_info=True)
        finally:
            self._socket.close(linger=_LINGER_MS)

    def _turn(self, poller: zmq.Poller) -> None:
        """Wait for something, a quarter of a second at most; then do all that is due."""
        poller.poll(_IDLE_MS)
        now_s = self.last_beat_s = time.monotonic()
        self._receive()
        self._reply()
        if now_s >= self._probe_s:
            self._probe_s = now_s + _PROBE_S
            self._probe()

    def _receive(self) -> None:
        """Take what has come."""
        for _ in range(_CALLS_PER_TURN):
            try:
                router, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(router, parts)
            except Exception:  # a bug of ours; others' calls go on
                logger.exception("a call could not be taken", extra={"event": "call_failed"})

    def _take(self, router: bytes, parts: list[bytes]) -> None:
        if len(parts) != 2:
            logger.warning("dropped a call of %d parts", len(parts), extra={"event": "malformed_call"})
            return
        request_id, payload = parts
        if not payload:
            self._cancel(request_id.decode("ascii", "replace"))
            return
        try:
            reply = self._start(self._decode(payload))
            if not isinstance(reply, Future):
                self._send(router, request_id, encode(reply))
                return
        except MalformedMessage as error:
            logger.warning("dropped a malformed call: %s", error, extra={"event": "malformed_call"})
            self._send(router, request_id, b"", b"MalformedMessage")
            return
        except Exception as error:
            logger.exception("a call failed at once", extra={"event": "call_failed"})
            self._send(router, request_id, b"", type(error).__name__.encode())
            return
        self._open[router].add(request_id)
        reply.add_done_callback(partial(self._on_done, router, request_id))

    def _on_done(self, router: bytes, request_id: bytes, future: Future[ReplyT]) -> None:
        """Any thread."""
        self._done.put((router, request_id, future))
        self._wake()

    def _wake(self) -> None:
        """Any thread. Once is enough until the thread has looked."""
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(OSError):  # full of wakes, or closed at the end
                self._wake_end.send(b"\0")

    def _reply(self) -> None:
        # In this order: who finds it woken has put something in before the queue is looked at.
        with contextlib.suppress(BlockingIOError):
            self._wakes.recv(4096)
        self._is_woken = False
        while not self._done.empty():
            router, request_id, future = self._done.get_nowait()
            self._close(router, request_id)
            try:
                parts = [encode(future.result())]
            except Exception as error:
                logger.error("a call failed", exc_info=error, extra={"event": "call_failed"})
                parts = [b"", type(error).__name__.encode()]
            self._send(router, request_id, *parts)

    def _close(self, router: bytes, request_id: bytes) -> None:
        if (ids := self._open.get(router)) is not None:
            ids.discard(request_id)
            if not ids:
                del self._open[router]

    def _probe(self) -> None:
        """Ask every router that waits for a reply whether it is there: ZeroMQ says so when its connection is not."""
        for router in list(self._open):
            if not self._send(router, b"", b""):
                extra = {"event": "router_gone", "num_calls": len(self._open[router])}
                logger.warning("a router has gone; its calls are cancelled", extra=extra)
                for request_id in self._open[router]:
                    self._cancel(request_id.decode("ascii", "replace"))

    def _send(self, router: bytes, *parts: bytes) -> bool:
        """Whether the router is there."""
        try:
            self._socket.send_multipart([router, *parts], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                logger.error("a reply could not be sent: %s", error, extra={"event": "reply_failed"})
            return False
        return True
