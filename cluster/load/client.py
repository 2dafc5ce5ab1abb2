"""Sends requests to one server and keeps what became of each. asyncio; many at once."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

from cluster.load.answer_reader import AnswerReader
from cluster.load.http_connection import BrokenResponse, HttpConnection
from cluster.load.request_record import RequestRecord

# Servers close idle connections, some after 5 s: one that is younger is not about to be closed under a request.
_MAX_IDLE_S = 2.0
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. endpoint: "completions" or "chat"."""

    url: str
    model: str
    endpoint: str = "completions"
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        base = urlsplit(self.url).path.rstrip("/").removesuffix("/v1")
        return base + _PATHS[self.endpoint]

    def head(self, body_len: int) -> bytes:
        """The request up to its body."""
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {urlsplit(self.url).netloc}",
            "Content-Type: application/json",
            f"Content-Length: {body_len}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """prompt: token ids (any array that orjson can write) or text; a chat takes text only."""

    index: int
    scheduled_s: float
    prompt: Any
    num_input_tokens: int
    max_tokens: int
    stream: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def body(self, target: Target) -> bytes:
        body: dict[str, Any] = {"model": target.model, "max_tokens": self.max_tokens, "stream": self.stream}
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if target.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["prompt"] = self.prompt
        return orjson.dumps(body | dict(self.options), option=orjson.OPT_SERIALIZE_NUMPY)


class Client:
    """Use on one event loop; close at the end."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        """timeout_s: for one request, connecting included."""
        self.target = target
        self._timeout_s = timeout_s
        self._idle: deque[tuple[float, HttpConnection]] = deque()
        parts = urlsplit(target.url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"not an HTTP address: {target.url}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)

    async def send(self, request: OutgoingRequest) -> RequestRecord:
        """Send it now, read the answer to its end. Never raises for what the server or the network does."""
        record = RequestRecord(
            request.index,
            request.scheduled_s,
            num_input_tokens=request.num_input_tokens,
            num_wanted_tokens=request.max_tokens,
        )
        body = request.body(self.target)
        record.sent_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(self.target.head(len(body)) + body, request.stream, record)
        except TimeoutError:
            record.error = f"no complete answer within {self._timeout_s:g} s"
        except (BrokenResponse, OSError) as error:
            record.error = record.error or (str(error) or type(error).__name__)
        record.ended_s = time.monotonic()
        return record

    async def _exchange(self, request: bytes, streamed: bool, record: RequestRecord) -> None:
        connection = await self._connection()
        reader = AnswerReader(record, streamed)
        refusal: list[bytes] = []

        def sink(piece: bytes, now_s: float) -> None:
            if connection.status == 200:
                reader.feed(piece, now_s)
            else:
                refusal.append(piece)

        try:
            status = await connection.exchange(request, sink)
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append((time.monotonic(), connection))
        else:
            connection.close()
        if status == 200:
            reader.finish()
        else:
            record.error = f"status {status}: {b''.join(refusal)[:200].decode(errors='replace')}"

    async def _connection(self) -> HttpConnection:
        while self._idle:
            idle_since_s, connection = self._idle.pop()
            if connection.is_reusable and time.monotonic() - idle_since_s < _MAX_IDLE_S:
                return connection
            connection.close()
        _, connection = await asyncio.get_running_loop().create_connection(
            HttpConnection, self._host, self._port, ssl=self._tls
        )
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()
