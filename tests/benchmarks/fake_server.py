"""An OpenAI-compatible server of a few lines, in a thread: streams what it is asked for, or fails as it is told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import orjson

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class FakeServer:
    """The failure comes from the request's own field "fault"; see `_respond`. Keeps every body it got, and streams
    nothing before it has so many of them."""

    def __init__(self, first_token_s: float, step_s: float, num_together: int) -> None:
        self._first_token_s, self._step_s, self._num_together = first_token_s, step_s, num_together
        self.bodies: list[dict[str, Any]] = []
        self.num_connections = 0
        self.url = ""

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(line.split(b": ", 1) for line in head.strip().split(b"\r\n")[1:])
                if head.startswith(b"GET /v1/models "):
                    models = b'{"data": [{"id": "a-model"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(models), models))
                    continue
                body = orjson.loads(await reader.readexactly(int(fields.get(b"Content-Length", b"0"))) or b"{}")
                if not body:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                self.bodies.append(body)
                if not await self._respond(writer, body):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _respond(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> bool:
        """False when the connection is to be closed."""
        fault = body.get("fault")
        if fault == "status":
            writer.write(b'HTTP/1.1 429 Too Many\r\nContent-Length: 17\r\n\r\n{"error": "full"}')
            return True
        if fault == "cut before":
            return False
        if not body["stream"]:
            answer = orjson.dumps({"choices": [{"text": "a b", "finish_reason": "length"}], "usage": _usage(body)})
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
            return True
        writer.write(_HEAD)
        async for event in self._events(body, fault):
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
        if fault == "cut":
            return False
        writer.write(b"0\r\n\r\n")
        return True

    async def _events(self, body: dict[str, Any], fault: str | None) -> AsyncIterator[bytes]:
        await asyncio.sleep(self._first_token_s)
        while len(self.bodies) < self._num_together:
            await asyncio.sleep(0.01)
        for index in range(body["max_tokens"]):
            if index:
                await asyncio.sleep(self._step_s)
            yield _event(_chunk(f" {index}", None))
            if fault == "error event":
                yield _event({"error": {"message": "out of luck", "code": 500}})
                return
            if fault == "cut":
                return
        yield _event(_chunk("", "length"))
        yield _event({"object": "text_completion", "choices": [], "usage": _usage(body)})
        if fault != "no done":
            yield b"data: [DONE]\n\n"


def _usage(body: dict[str, Any]) -> dict[str, int]:
    return {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}


def _chunk(text: str, finish_reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return {"object": "text_completion", "choices": [choice], "usage": None}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


@contextmanager
def fake_server(first_token_s: float = 0.02, step_s: float = 0.005, num_together: int = 1) -> Iterator[FakeServer]:
    """A running one."""
    fake = FakeServer(first_token_s, step_s, num_together)
    loop = asyncio.new_event_loop()
    started = threading.Event()

    def run() -> None:
        server = loop.run_until_complete(fake.start())
        started.set()
        loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(120)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(120)
