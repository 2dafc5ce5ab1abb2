"""Expect: 100-continue in Serve's proxy, against uvicorn's own server on loopback."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from cluster.http import proxy_expect
from cluster.http.proxy_expect import ProxyExpect

HEAD = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-Continue\r\n\r\n"


async def serve_proxy(scope: Scope, receive: Receive, send: Send) -> None:
    """As Ray Serve's proxy: asks for the body at once, on a task of its own, and gives up where the client has gone."""
    messages: asyncio.Queue[Message] = asyncio.Queue()

    async def forward() -> None:
        while True:
            message = await receive()
            messages.put_nowait(message)
            if message["type"] == "http.disconnect":
                return

    reading = asyncio.create_task(forward())
    answering = asyncio.create_task(ingress(scope, messages, send))
    await asyncio.wait([reading, answering], return_when=asyncio.FIRST_COMPLETED)
    reading.cancel()
    answering.cancel()


async def ingress(scope: Scope, messages: asyncio.Queue[Message], send: Send) -> None:
    if scope["path"] == "/refused":
        await asyncio.sleep(0.05)
        await answer(send, 413, b"too long")
        return
    body, more = b"", True
    while more:
        message = await messages.get()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await answer(send, 200, body)


async def answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await asyncio.sleep(0.02)  # a begun answer is not cut by what `receive` gives
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(ProxyExpect(serve_proxy), log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listener.getsockname()
        server.should_exit = True
        thread.join()


def test_a_refusal_by_the_head_comes_without_go_on(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_expect, "PATIENCE_S", 120.0)  # the machine may be slow
    with socket.create_connection(server, timeout=120) as link:
        link.sendall(HEAD % b"/refused")
        received = b"".join(iter(lambda: link.recv(65_536), b""))
    assert received.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nconnection: close\r\n" in received
    assert received.endswith(b"\r\n\r\ntoo long")


def test_who_is_not_refused_is_told_to_go_on_and_may_ask_again(
    server: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_expect, "PATIENCE_S", 0.1)
    with socket.create_connection(server, timeout=120) as link, link.makefile("rb") as answers:
        for body in (b"first", b"again"):
            link.sendall(HEAD % b"/read")
            assert [answers.readline(), answers.readline()] == [b"HTTP/1.1 100 Continue\r\n", b"\r\n"]
            link.sendall(body)
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
            while answers.readline() != b"\r\n":
                pass
            assert answers.read(5) == body


def test_others_do_not_wait(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_expect, "PATIENCE_S", 3600.0)
    with socket.create_connection(server, timeout=120) as link:
        link.sendall((HEAD % b"/read").replace(b"Expect", b"X-Expect") + b"whole")
        assert link.recv(65_536).startswith(b"HTTP/1.1 200 OK")
