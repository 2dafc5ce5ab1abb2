"""One HTTP/1.1 connection that costs little per piece received, and stamps each with the time it came.

At 256 streams of 140 tokens a second a general client takes more CPU than the server under test.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

Sink = Callable[[bytes, float], None]

_MAX_HEAD_BYTES = 65_536


class BrokenResponse(Exception):
    """The connection or the framing failed; no complete response came."""


class HttpConnection(asyncio.Protocol):
    """One request at a time. After a response, `is_reusable` says whether another may follow."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._buffer = b""
        self._feed: Callable[[bytes, float], bytes] = self._feed_head
        self._left = 0  # of the body, or of the chunk with its line end
        self._is_until_close = False
        self._closes = False
        self.status = 0
        self.is_reusable = False

    async def exchange(self, request: bytes, sink: Sink) -> int:
        """Send a request, pass the body's pieces to `sink(piece, now_s)`; the status once it is complete.

        Raises BrokenResponse. `status` is known before the first piece.
        """
        assert self._transport is not None, "not connected"
        if self._transport.is_closing():
            raise BrokenResponse("the connection is closed")
        self._buffer, self._feed, self._sink = b"", self._feed_head, sink
        self.status, self.is_reusable, self._is_until_close = 0, False, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        return self.status

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's side ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        if self._done is None or self._done.done():
            self.close()  # nobody asked
            return
        try:
            data = self._buffer + data if self._buffer else data
            self._buffer = self._feed(data, now_s)
        except (ValueError, BrokenResponse) as error:
            self._fail(f"malformed response: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        if self._is_until_close and error is None and self._done is not None and not self._done.done():
            self._done.set_result(None)
        self._fail(f"connection lost: {error}" if error else "connection closed before the response was complete")

    # -- framing: each takes what it can and returns the rest --------------------------------------

    def _feed_head(self, data: bytes, now_s: float) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _MAX_HEAD_BYTES:
                raise BrokenResponse("headers without end")
            return data
        status_line, *lines = data[:end].split(b"\r\n")
        if not status_line.startswith(b"HTTP/1."):
            raise BrokenResponse("not HTTP/1")
        self.status = int(status_line[9:12])
        rest = data[end + 4 :]
        if 100 <= self.status < 200:
            return self._feed_head(rest, now_s)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self._closes = headers.get(b"connection", b"").lower() == b"close" or status_line.startswith(b"HTTP/1.0")
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._feed, self._left = self._feed_chunks, 0
        elif b"content-length" in headers:
            self._feed, self._left = self._feed_length, int(headers[b"content-length"])
        else:
            self._feed, self._is_until_close, self._closes = self._feed_until_close, True, True
        return self._feed(rest, now_s)

    def _feed_length(self, data: bytes, now_s: float) -> bytes:
        piece, rest = data[: self._left], data[self._left :]
        self._left -= len(piece)
        self._pass_on(piece, now_s)
        if self._left == 0:
            self._complete(rest)
        return b""

    def _feed_until_close(self, data: bytes, now_s: float) -> bytes:
        self._pass_on(data, now_s)
        return b""

    def _feed_chunks(self, data: bytes, now_s: float) -> bytes:
        position = 0
        while position < len(data):
            if self._left == 0:
                end = data.find(b"\r\n", position)
                if end < 0:
                    break
                size = int(data[position:end].partition(b";")[0], 16)
                position = end + 2
                if size == 0:
                    self._feed = self._feed_trailer
                    return self._feed_trailer(data[position:], now_s)
                self._left = size + 2
            taken = min(self._left, len(data) - position)
            size = max(0, min(taken, self._left - 2))  # the chunk's own line end is not passed on
            self._pass_on(data[position : position + size], now_s)
            self._left -= taken
            position += taken
        return data[position:]

    def _feed_trailer(self, data: bytes, now_s: float) -> bytes:
        while (end := data.find(b"\r\n")) >= 0:
            line, data = data[:end], data[end + 2 :]
            if not line:
                self._complete(data)
                return b""
        return data

    def _pass_on(self, piece: bytes, now_s: float) -> None:
        if piece and self._sink is not None:
            self._sink(piece, now_s)

    def _complete(self, rest: bytes) -> None:
        if rest:
            raise BrokenResponse("bytes after the response")
        self.is_reusable = not self._closes
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(BrokenResponse(reason))
