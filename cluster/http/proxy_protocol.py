"""HTTP as Ray Serve's proxy speaks it, with bounds for what comes before a body, and for clients that don't read their
answers: uvicorn itself has none, so one client could hold the proxy's loop, its memory or its connections.

Ray Serve takes uvicorn's protocol of the name "auto"; `bound_connections` registers ours under it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import orjson
import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.api_error import ApiError

logger = logging.getLogger(__name__)

# Twice what a browser, a gateway and a tracer together send; nginx has 32 KiB.
MAX_HEAD_BYTES = 65_536
# The parser takes no longer ones.
MAX_URL_BYTES = 65_535
# From the connection, or the first byte of a further request, to the end of its headers.
HEAD_TIMEOUT_S = 30.0
# How long a client may leave lying what is there for it: more than the 64 KiB that uvicorn keeps, besides what the
# kernels of both sides do. What is generated meanwhile waits behind it, at the ingress.
SLOW_READER_S = 60.0
_REFUSAL = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"


def bound_connections(on_slow_reader: Callable[[], None]) -> None:
    """Servers that uvicorn starts in this process from now on have the bounds. on_slow_reader: called when one is cut.
    Mutates uvicorn's table of protocols."""
    protocol: Any = partial(BoundedConnection, on_slow_reader)
    uvicorn.config.HTTP_PROTOCOLS["auto"] = protocol


class BoundedConnection(HttpToolsProtocol):
    """Ends a connection whose client does not read its answer.

    Closes one whose next request line and headers are too long (414, 431), too late (408) or no HTTP (400). What it
    says then is an error in OpenAI's envelope, unless an answer is under way. Beside MAX_HEAD_BYTES comes what is read
    at once with a head's first byte: that is not counted.
    """

    def __init__(self, on_slow_reader: Callable[[], None], *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._on_slow_reader = on_slow_reader
        self._unread: asyncio.TimerHandle | None = None
        self.url = b""  # before the first request too
        self._num_heads = 0  # begun
        self._is_in_head = True
        self._num_head_bytes = 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._is_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(SLOW_READER_S, self._cut)

    def resume_writing(self) -> None:
        self._is_read()
        super().resume_writing()

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _cut(self) -> None:
        """Not closed: that would wait until it has read. Its generation ends as of any client that has gone."""
        self._unread = None
        extra = {"event": "slow_reader", "num_bytes": self.transport.get_write_buffer_size()}
        logger.warning("a client has not read its answer for %g s: cut", SLOW_READER_S, extra=extra)
        self._on_slow_reader()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        num_heads = self._num_heads
        super().data_received(data)
        if not self._is_in_head or num_heads != self._num_heads or self.transport.is_closing():
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse_length()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_heads += 1
        self._is_in_head, self._num_head_bytes = True, 0
        if self._late is None:
            self._wait()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    @property
    def _is_answering(self) -> bool:
        # None before the first request, whatever its type says.
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]

    @property
    def _has_begun_to_answer(self) -> bool:
        """Bytes of an answer have left and more will, so nothing may come between them."""
        return bool(self.pipeline) or (self._is_answering and self.cycle.response_started)

    def _wait(self) -> None:
        self._late = self.loop.call_later(HEAD_TIMEOUT_S, self._on_late)

    def _on_late(self) -> None:
        self._late = None
        if self._is_answering:  # nothing is read meanwhile
            self._wait()
        else:
            message = f"the request's headers have not come within {HEAD_TIMEOUT_S:g} seconds"
            self._refuse(ApiError(408, message, code="head_timeout"))

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def send_400_response(self, msg: str) -> None:
        """What was read is no HTTP, says the parser; of too long a URL it says the same. Called within a body too."""
        if len(self.url) > MAX_URL_BYTES:
            self._refuse_length()
            return
        if not self._has_begun_to_answer:
            self._write(ApiError(400, "the request is no valid HTTP/1.1", code="invalid_http"))
        self.transport.close()

    def _refuse_length(self) -> None:
        if len(self.url) > MAX_URL_BYTES:
            message = f"the URL is too long: at most {MAX_URL_BYTES} bytes are allowed"
            self._refuse(ApiError(414, message, code="url_too_long"))
            return
        message = f"the request's headers are too long: at most {MAX_HEAD_BYTES} bytes are allowed"
        self._refuse(ApiError(431, message, code="headers_too_long"))

    def _refuse(self, error: ApiError) -> None:
        """The head that is being read. While the one before it is answered the connection only ends."""
        if self._num_heads and not self._is_answering:
            self._write(error)
        self.transport.close()

    def _write(self, error: ApiError) -> None:
        body = orjson.dumps(error.envelope())
        phrase = HTTPStatus(error.status).phrase.encode()
        self.transport.write(_REFUSAL % (error.status, phrase, len(body), body))
