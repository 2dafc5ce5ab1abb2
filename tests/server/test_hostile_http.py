"""HTTP that no client should send, over bare sockets against a running server: each is refused or closed, none is
answered with 5xx or left hanging, and others do not notice."""

from __future__ import annotations

import contextlib
import gzip
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.server.conftest import API_KEY
from tests.server.running_server import RunningServer
from tests.server.test_cases import TEXT, connection, http_request, read_answer

KEY = f"Authorization: Bearer {API_KEY}\r\n"
GET = f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{KEY}"
POST = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\n{KEY}Content-Type: application/json\r\n"
BODY = b'{"prompt":"a","max_tokens":1}'
ZIPPED = gzip.compress(BODY)
CHUNKED = POST.encode() + b"Transfer-Encoding: chunked\r\n\r\n"
UPGRADE = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
CLOSED = 0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(api_server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    with httpx.Client(base_url=api_server.url, timeout=120, headers=headers) as client:
        yield client
        assert client.post(TEXT, content=BODY, headers={"content-type": "application/json"}).status_code == 200
    api_server.wait_for_baseline()


def post(headers: str, body: bytes) -> bytes:
    return f"{POST}{headers}\r\n\r\n".encode() + body


# What is sent, and what may come back; CLOSED: the connection ends without an answer.
RAW: dict[str, tuple[bytes, set[int]]] = {
    # lengths and chunks
    "length that is no number": (post("Content-Length: abc", BODY), {400}),
    "negative length": (post("Content-Length: -1", BODY), {400}),
    "length with a sign": (post("Content-Length: +5", BODY), {400}),
    "length in base 16": (post("Content-Length: 0x1d", BODY), {400}),
    "length beyond 64 bits": (post(f"Content-Length: {10**30}", BODY), {400, 413}),
    "two lengths": (post(f"Content-Length: {len(BODY)}\r\nContent-Length: 5", BODY), {400}),
    "length too small": (post("Content-Length: 5", BODY), {400}),
    "length and chunks": (post("Content-Length: 2\r\nTransfer-Encoding: chunked", b"0\r\n\r\n"), {400}),
    "no length, no chunks": (post("X-A: b", b""), {400, 411}),
    "chunk that is no number": (CHUNKED + b"xyz\r\n", {400}),
    "negative chunk": (CHUNKED + b"-1\r\n", {400}),
    "chunk beyond 64 bits": (CHUNKED + b"f" * 40 + b"\r\n", {400}),
    "chunk longer than it says": (CHUNKED + b"2\r\n" + BODY + b"\r\n0\r\n\r\n", {400}),
    "chunks, then more than chunks": (post("Transfer-Encoding: gzip, chunked", b"2\r\n{}\r\n0\r\n\r\n"), {400, 415}),
    "unknown transfer coding": (post("Transfer-Encoding: gzip", b"{}"), {400, 501}),
    # the first line
    "no version": (b"GET /health\r\n\r\n", {200, 400}),
    "version 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
    "version 9.9": (b"GET /health HTTP/9.9\r\n\r\n", {400, 505}),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 200, {400}),
    "unknown method": (b"BREW /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n", {400}),
    "CONNECT": (b"CONNECT example.org:80 HTTP/1.1\r\nHost: x\r\n\r\n", {400, 401, 404, 405, CLOSED}),
    "path that is no ASCII": (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", {400}),
    "no path": (b"GET  HTTP/1.1\r\nHost: x\r\n\r\n", {400}),
    "asterisk": (f"OPTIONS * HTTP/1.1\r\nHost: x\r\n{KEY}\r\n".encode(), {400, 404, 405}),
    "absolute address": (GET.replace("/v1", "http://evil.example/v1").encode() + b"\r\n", {200, 400, 404}),
    # headers
    "space before the colon": (GET.encode() + b"X-A : b\r\n\r\n", {400}),
    "header without a colon": (GET.encode() + b"X-A\r\n\r\n", {400}),
    "folded header": (GET.encode() + b"X-A: b\r\n c\r\n\r\n", {200, 400}),
    "header with a zero": (GET.encode() + b"X-A: b\0c\r\n\r\n", {400}),
    "header that is no UTF-8": (GET.encode() + b"User-Agent: \xff\xfe\r\n\r\n", {200}),
    "two keys": (GET.encode() + b"Authorization: Bearer x\r\n\r\n", {200, 400, 401}),
    "WebSocket": (f"{GET}{UPGRADE}Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode(), {400, 403, 404}),
    "upgrade to something": (GET.encode() + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", {200, 400, 426}),
    # bodies
    "gzip": (post(f"Content-Encoding: gzip\r\nContent-Length: {len(ZIPPED)}", ZIPPED), {400, 415}),
    "another content type": (post("Content-Length: 29", BODY).replace(b"application/json", b"text/xml"), {415}),
    "content type of nothing": (post("Content-Length: 29", BODY).replace(b"application/json", b";;;"), {415}),
    "body of a GET": (f"{GET}Content-Length: 2\r\n\r\n{{}}".encode(), {200, 400}),
    "HTTP/1.0": (post("Content-Length: 29", BODY).replace(b"HTTP/1.1", b"HTTP/1.0"), {200}),
    "told to go on": (post("Expect: 100-continue\r\nContent-Length: 29", BODY), {200}),
    "expects something else": (post("Expect: tea\r\nContent-Length: 29", BODY), {200, 417}),
    # paths
    "path with a zero": (GET.replace("models", "models/%00%ff").encode() + b"\r\n", {404}),
    "path that climbs": (GET.replace("/v1/models", "/../../etc/passwd").encode() + b"\r\n", {404}),
    "path that climbs, hidden": (GET.replace("/v1/models", "/v1/models/%2e%2e/%2e%2e/etc").encode() + b"\r\n", {404}),
    "two slashes": (GET.replace("/v1", "//v1").encode() + b"\r\n", {404}),
    "too long a path": (GET.replace("models", "m" * 70_000).encode() + b"\r\n", {414}),
    "too long a body, asked about first": (post("Expect: 100-continue\r\nContent-Length: 5000000", b""), {413}),
    "no key, asked about first": (
        post("Expect: 100-continue\r\nContent-Length: 29", b"").replace(b"Bearer", b"Basic"), {401}
    ),
    "long path": (GET.replace("models", "m" * 60_000).encode() + b"\r\n", {404, 414, 431}),
    "wrong percent signs": (GET.replace("models", "models/%zz%").encode() + b"\r\n", {400, 404}),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_odd_http_is_refused_or_closed(name: str, api_server: RunningServer, client: httpx.Client) -> None:
    message, expected = RAW[name]
    with connection(api_server) as link:
        link.settimeout(20)
        link.sendall(message)
        status = first_status(link)
    assert status in expected


def first_status(link: socket.socket) -> int:
    """Of the first answer that is not 100; CLOSED when there is none."""
    try:
        with link.makefile("rb") as file:
            line = file.readline()
            while line.startswith(b"HTTP/1.1 100"):
                while file.readline().strip():
                    pass
                line = file.readline()
    except ConnectionResetError:
        return CLOSED
    return int(line.split()[1]) if line else CLOSED


def refused_or_closed(link: socket.socket, message: bytes) -> int:
    """Status of the answer to what the server need not read to its end."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        link.sendall(message)
    return first_status(link)


@pytest.mark.parametrize("header", [b"X-A: b\r\n" * 250_000, b"X-A: " + b"a" * 2_000_000 + b"\r\n"])
def test_huge_headers_are_refused_while_others_are_served(header: bytes, api_server: RunningServer) -> None:
    with connection(api_server) as link:
        assert refused_or_closed(link, GET.encode() + header + b"\r\n") in (431, CLOSED)
    assert httpx.get(f"{api_server.url}/health", timeout=120).status_code == 200


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "POST", "GET"])
def test_other_methods(method: str, client: httpx.Client) -> None:
    read, written = {"GET", "HEAD"}, {"POST"}
    for path, allowed in [(TEXT, written), ("/v1/models", read), ("/tokenize", written), ("/health", read)]:
        if method not in allowed:
            response = client.request(method, path)
            assert response.status_code == 405, path
            assert set(response.headers["allow"].split(", ")) == allowed, path
            assert method == "HEAD" or response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/v1/models", "/version"])
def test_head_answers_as_get_does_without_the_body(path: str, client: httpx.Client) -> None:
    got, probed = client.get(path), client.head(path)
    assert (probed.status_code, probed.content) == (got.status_code, b"")
    assert probed.headers["content-length"] == got.headers["content-length"]


def test_slow_heads_do_not_keep_others_waiting(api_server: RunningServer, client: httpx.Client) -> None:
    """Where the machine stands still for so long it is asked again, beside other slow heads."""
    took_s = _beside_slow_heads(api_server, client)
    if took_s >= 20:
        took_s = _beside_slow_heads(api_server, client)
    assert took_s < 20, "heads are waited for 30 s"


def _beside_slow_heads(api_server: RunningServer, client: httpx.Client) -> float:
    """How long a request takes, in seconds."""
    links = [connection(api_server) for _ in range(100)]
    try:
        for number, link in enumerate(links):
            link.sendall(POST.encode()[: number * 2])
        started_s = time.monotonic()
        assert client.get("/v1/models").status_code == 200
        return time.monotonic() - started_s
    finally:
        for link in links:
            link.close()


def test_garbage_behind_a_request_ends_the_connection(api_server: RunningServer) -> None:
    with connection(api_server) as link, link.makefile("rb") as file:
        link.sendall(http_request(BODY))
        assert read_answer(file)[0] == 200
        link.sendall(b"trailing garbage\r\n\r\n")
        assert b" 400 " in file.readline()
        assert file.read()  # to its end: the connection is closed
    with connection(api_server) as link:
        link.sendall(http_request(BODY) + b"trailing garbage\r\n\r\n")
        assert first_status(link) in (200, 400)


def test_a_client_that_half_closes_harms_nobody(api_server: RunningServer, client: httpx.Client) -> None:
    """uvicorn takes it for a client that has gone."""
    for _ in range(3):
        with connection(api_server) as link:
            link.sendall(http_request(BODY))
            link.shutdown(socket.SHUT_WR)
            assert first_status(link) in (200, CLOSED)
    assert client.get("/v1/models").status_code == 200


def test_ray_serves_own_pages_answer_without_a_key(api_server: RunningServer) -> None:
    """As docs/api.md says: they tell the application's name, and nothing of a request."""
    assert httpx.get(f"{api_server.url}/-/healthz").text == "success"
    routes = httpx.get(f"{api_server.url}/-/routes").json()
    assert list(routes) == ["/"]
    for path in ("/-/routes/x", "/-/", "/-/metrics"):
        assert httpx.get(f"{api_server.url}{path}").status_code == 401
