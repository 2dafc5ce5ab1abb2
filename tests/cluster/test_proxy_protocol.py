"""Bounds on what comes before a body, against uvicorn's own server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn
import uvicorn.config
from starlette.types import Message, Receive, Scope, Send

from cluster.http import proxy_protocol
from cluster.http.proxy_headers import middlewares

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
LATE_S = 1.0
FLOODS_ENDED: list[int] = []  # answers that were as long as their client was there


def more_may_come(message: Message) -> bool:
    return message["type"] != "http.disconnect"


async def count_body(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the number of bytes that came, after a while if the path says so."""
    num_bytes, more = 0, True
    while more:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/slow":
        await asyncio.sleep(2 * LATE_S)
    if scope["path"] == "/flood":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while more_may_come(message):
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    message = await receive()
        FLOODS_ENDED.append(1)
        return
    if scope["path"] == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        while more_may_come(await receive()):
            pass
        return
    text = b"%d" % num_bytes
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
        middlewares()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            server = uvicorn.Server(uvicorn.Config(count_body, log_config=None, lifespan="off"))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            while not server.started:
                time.sleep(0.01)
            yield listener.getsockname()[1]
            server.should_exit = True
            thread.join()


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads have little time. Only for tests of that: others shall not depend on how fast the machine is."""
    monkeypatch.setattr(proxy_protocol, "HEAD_TIMEOUT_S", LATE_S)


@contextmanager
def link_to(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=120) as link:
        yield link


def everything(link: socket.socket) -> bytes:
    """Until the server closes."""
    answer = b""
    try:
        while part := link.recv(65_536):
            answer += part
    except ConnectionResetError:  # it closed before it had read all
        pass
    return answer


def error_in(head: bytes, body: bytes) -> tuple[str, str, str]:
    """Of an answer in OpenAI's envelope: message, type and code."""
    assert b"\r\ncontent-type: application/json\r\n" in head + b"\r\n"
    assert f"\r\ncontent-length: {len(body)}\r\n".encode() in head
    error = json.loads(body)["error"]
    assert error["param"] is None
    return error["message"], error["type"], error["code"]


@pytest.mark.parametrize("piece", [b"X-A: b\r\n" * 8_192, b"a" * 65_536], ids=["many headers", "one long header"])
def test_a_head_without_end_is_refused(piece: bytes, port: int) -> None:
    sent = 0
    with link_to(port) as link:
        link.sendall(GET + b"X-B: ")
        try:
            while sent < 2**25:
                sent += link.send(piece)
        except (ConnectionResetError, BrokenPipeError):
            pass
        assert sent < 2**23  # what the sockets' buffers take; the rest never left
        assert everything(link)[:12] in (b"HTTP/1.1 431", b"")


def test_the_refusal_says_why(port: int) -> None:
    """What comes with the first byte is not counted, and on a busy machine that may be all of it: then again."""
    message = GET + (b"X-A: " + b"a" * 40_000 + b"\r\n") * 5 + b"Connection: close\r\n\r\n"
    tries = (answer_to_pieces(message, 8, port).partition(b"\r\n\r\n") for _ in range(20))
    head, _, body = next(answer for answer in tries if answer[0].startswith(b"HTTP/1.1 431 "))
    assert error_in(head, body) == (
        "the request's headers are too long: at most 65536 bytes are allowed",
        "invalid_request_error",
        "headers_too_long",
    )


def answer_to(message: bytes, port: int) -> bytes:
    """Everything that comes. Where this machine stands still before the message is out, the server hears nothing in
    time and closes without a word: then again."""
    for _ in range(20):
        with link_to(port) as link, contextlib.suppress(ConnectionResetError, BrokenPipeError):
            link.sendall(message)
            if answer := everything(link):
                return answer
    raise AssertionError("never a word")


def test_a_slow_head_is_given_up(port: int, hurry: None) -> None:
    started_s = time.monotonic()
    with link_to(port) as silent:
        assert answer_to(GET, port).startswith(b"HTTP/1.1 408 ")
        assert everything(silent) == b""
    assert time.monotonic() - started_s > LATE_S * 0.9


def test_a_slow_head_after_an_answer_is_given_up(port: int, hurry: None) -> None:
    answer = answer_to(GET + b"\r\n" + GET, port)
    assert [answer.count(status) for status in (b"HTTP/1.1 200", b"HTTP/1.1 408")] == [1, 1]


def test_an_answer_that_takes_longer_than_a_head_may_is_given(port: int, hurry: None) -> None:
    assert answer_to(GET.replace(b"/ ", b"/slow ", 1) + b"\r\n" + GET, port).count(b"HTTP/1.1 200") == 1


def test_large_bodies_and_several_requests_at_once_pass(port: int) -> None:
    large = POST % 3_000_000 + b"x" * 3_000_000
    many = (GET + b"X-A: " + b"a" * 20_000 + b"\r\n\r\n") * 20
    with link_to(port) as link:
        link.sendall(large + many + large + GET + b"Connection: close\r\n\r\n")
        answer = everything(link)
    assert answer.count(b"HTTP/1.1 200") == 23
    assert answer.count(b"\r\n\r\n3000000") == 2


@pytest.mark.parametrize("pieces", [1, 2, 7])
@pytest.mark.parametrize("num_bytes", [70_000, 100_000])
def test_a_url_that_is_too_long_is_414(num_bytes: int, pieces: int, port: int) -> None:
    """However it comes. (The parser's own answer was 400 in plain text.)"""
    message = GET.replace(b"/ ", b"/" + b"a" * num_bytes + b" ", 1) + b"\r\n"
    answer = b""
    for _ in range(20):  # a close before all was read may lose what was said
        answer = answer or answer_to_pieces(message, pieces, port)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 414 ")
    assert error_in(head, body) == (
        "the URL is too long: at most 65535 bytes are allowed",
        "invalid_request_error",
        "url_too_long",
    )


def answer_to_pieces(message: bytes, num: int, port: int) -> bytes:
    with link_to(port) as link:
        try:
            for index in range(num):
                link.sendall(message[index * len(message) // num : (index + 1) * len(message) // num])
                time.sleep(0.02)
        except (ConnectionResetError, BrokenPipeError):
            pass
        return everything(link)


def test_the_longest_url_is_answered(port: int) -> None:
    with link_to(port) as link:
        link.sendall(GET.replace(b"/ ", b"/" + b"a" * 65_534 + b" ", 1) + b"Connection: close\r\n\r\n")
        assert everything(link).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "message",
    [b"\x16\x03\x01\x02\x00\xfc", b"GET  HTTP/1.1\r\n\r\n", GET + b"X-A\r\n\r\n", POST % 5 + b"{}{}{" + b"}\r\n"],
    ids=["TLS", "no path", "no colon", "more than its length"],
)
def test_what_is_no_http_is_refused_in_an_envelope(message: bytes, port: int) -> None:
    with link_to(port) as link:
        link.sendall(message)
        head, _, body = everything(link).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert error_in(head, body) == ("the request is no valid HTTP/1.1", "invalid_request_error", "invalid_http")


def test_what_is_no_http_never_comes_into_an_answer_that_is_under_way(port: int) -> None:
    with link_to(port) as link:
        link.sendall(GET.replace(b"/ ", b"/stream ", 1) + b"\r\n")
        begun = b""
        while b"first" not in begun:
            begun += link.recv(65_536)
        link.sendall(b"\0\0\0")
        rest = everything(link)
    assert begun.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1" not in begun[1:] + rest
    assert b"error" not in begun + rest


def test_a_client_that_reads_a_byte_a_second_is_cut_and_its_answer_ends(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And who reads is not; but where this machine stands still, nobody reads: then again."""
    monkeypatch.setattr(proxy_protocol, "SLOW_READER_S", LATE_S)
    for _ in range(10):
        caplog.clear()
        is_cut, longest_pause_s = read_beside_a_slow_reader(port, caplog)
        num_cut = len(slow_readers(caplog))
        if not is_cut and num_cut == 1:
            return
        assert longest_pause_s > LATE_S / 2, (is_cut, num_cut)
    raise AssertionError("it never read without a pause")


def read_beside_a_slow_reader(port: int, caplog: pytest.LogCaptureFixture) -> tuple[bool, float]:
    """Until the slow one is cut and its answer has ended: whether who reads was cut, and how long it once did not."""
    num_ended, began_s, pauses_s = len(FLOODS_ENDED), time.monotonic(), [0.0]
    read_s, is_cut = began_s, False
    with link_to(port) as slow, link_to(port) as reader:
        for link in (slow, reader):
            link.sendall(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        while not is_cut and not (slow_readers(caplog) and len(FLOODS_ENDED) > num_ended):
            assert read_s < began_s + 120.0, "not in time"
            try:
                is_cut = not reader.recv(1 << 20)
            except ConnectionResetError:
                is_cut = True
            pauses_s.append(time.monotonic() - read_s)
            read_s += pauses_s[-1]
            if not slow_readers(caplog) and int(read_s * 20) % 20 == 0:
                slow.recv(1)
        with contextlib.suppress(ConnectionResetError):
            while not is_cut and slow.recv(1 << 20):  # what had come, and then its end
                pass
    return is_cut, max(pauses_s)


def slow_readers(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if vars(record).get("event") == "slow_reader"]
