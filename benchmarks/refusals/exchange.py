"""One request and its answer over a connection of its own; the answer may come before the request has left."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from benchmarks.refusals.bodies import Kind

_CHUNK = 65_536
_TIMEOUT_S = 60.0


def exchange(url: str, kind: Kind, headers: Mapping[str, str] | None = None) -> tuple[int, float]:
    """(status, seconds until the whole answer was there). Blocks. Raises TimeoutError, ConnectionError."""
    address = urlsplit(url)
    message = memoryview(_message(kind, {"Host": address.netloc, "Content-Type": kind.content_type, **(headers or {})}))
    started_s = time.perf_counter()
    with socket.create_connection((address.hostname, address.port), timeout=_TIMEOUT_S) as connection:
        answer, sent = b"", 0
        while not _is_whole(answer):
            wanted = [connection] if sent < len(message) else []
            readable, writable, _ = select.select([connection], wanted, [], _TIMEOUT_S)
            if readable:
                part = connection.recv(_CHUNK)
                if not part:
                    raise ConnectionError(f"{kind.name}: closed after {len(answer)} bytes of an answer")
                answer += part
            elif writable:
                sent += connection.send(message[sent : sent + _CHUNK])
            else:
                raise TimeoutError(f"{kind.name}: no answer within {_TIMEOUT_S:g} s")
        return int(answer.split(b" ", 2)[1]), time.perf_counter() - started_s


def _message(kind: Kind, headers: Mapping[str, str]) -> bytes:
    head = f"POST {kind.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if not kind.is_chunked:
        return f"{head}Content-Length: {len(kind.body)}\r\n\r\n".encode() + kind.body
    pieces = [kind.body[start : start + _CHUNK] for start in range(0, len(kind.body), _CHUNK)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"


def _is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return len(body) >= int(value)
        if name.lower() == b"transfer-encoding":
            return body.endswith(b"0\r\n\r\n")
    return False
