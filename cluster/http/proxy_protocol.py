"""HTTP as Ray Serve's proxy speaks it, with bounds for what comes before a body: uvicorn itself has none, so one client
could hold the proxy's loop, its memory or its connections without any key.

Ray Serve takes uvicorn's protocol of the name "auto"; `bound_request_heads` registers ours under it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Twice what a browser, a gateway and a tracer together send; nginx has 32 KiB.
MAX_HEAD_BYTES = 65_536
# From the connection, or the first byte of a further request, to the end of its headers.
HEAD_TIMEOUT_S = 30.0
_REFUSAL = (
    b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
)


def bound_request_heads() -> None:
    """Servers that uvicorn starts in this process from now on have the bounds. Mutates uvicorn's table of protocols."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:BoundedHeads"


class BoundedHeads(HttpToolsProtocol):
    """Closes a connection whose next request line and headers are too long (431) or too late (408).

    Beside MAX_HEAD_BYTES comes what is read at once with a head's first byte: that is not counted.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._num_heads = 0  # begun
        self._is_in_head = True
        self._num_head_bytes = 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        num_heads = self._num_heads
        super().data_received(data)
        if not self._is_in_head or num_heads != self._num_heads or self.transport.is_closing():
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large", b"The request's headers are too long.")

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

    def _wait(self) -> None:
        self._late = self.loop.call_later(HEAD_TIMEOUT_S, self._on_late)

    def _on_late(self) -> None:
        self._late = None
        if self._is_answering:  # nothing is read meanwhile
            self._wait()
        else:
            self._refuse(b"408 Request Timeout", b"The request's headers have not come in time.")

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: bytes, message: bytes) -> None:
        if self._num_heads and not self._is_answering:
            self.transport.write(_REFUSAL % (status, len(message), message))
        self.transport.close()
