"""A client that goes, in every way a server has to say so, at every moment.

The request is counted once, the gauge of requests in flight is back at zero, and no work goes on.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.cluster.fake_ingress import HANG, LENGTH, FakeIngress, ScriptedSource, text

C, H = "/v1/completions", "/v1/chat/completions"
BOTH = pytest.mark.parametrize("path", [C, H])
MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def body_of(path: str, **values: Any) -> dict[str, Any]:
    prompt = {"prompt": "p"} if path == C else {"messages": [{"role": "user", "content": "p"}]}
    return prompt | {"max_tokens": 100} | values


class Connection:
    """One request to the app, as a server makes it. sent: what came back. gone: set, the client has left.

    A server tells of that in three ways: by a message (ASGI 2.3), by an OSError from send (2.4), or, as Ray Serve
    does, by cancelling the task; sometimes in two of them.
    """

    def __init__(self, ingress: FakeIngress, path: str, body: dict[str, Any], spec_version: str = "2.3") -> None:
        self.ingress = ingress
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.send_fails = False
        self.incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": spec_version}, "http_version": "1.1",
            "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
            "scheme": "http", "server": ("x", 80), "client": ("y", 1), "root_path": "",
        }  # fmt: skip
        self.task = asyncio.create_task(self._run(scope))

    async def _run(self, scope: dict[str, Any]) -> None:
        await self.ingress.app()(scope, self._receive, self._send)  # type: ignore[arg-type]

    async def _receive(self) -> dict[str, Any]:
        if self.incoming:
            return self.incoming.pop(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await asyncio.sleep(0)
        if self.send_fails:
            raise OSError("connection reset")
        self.sent.append(message)

    async def ended(self) -> None:
        """The request is over: counted once, as cancelled, and nothing of it goes on."""
        await asyncio.wait({self.task}, timeout=120)
        assert self.task.done()
        assert self.task.cancelled() or self.task.exception() is None
        assert self.ingress.source.open_prompts == []
        assert self.ingress.num_in_flight == 0
        assert self.ingress.outcomes() == {"cancelled": 1}


async def spin(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


@BOTH
@pytest.mark.parametrize("how", ["message", "send", "cancel"])
async def test_gone_in_the_middle_of_a_stream(path: str, how: str) -> None:
    steps = [*text(0, "ab"), HANG] if how != "send" else text(0, "a" * 10_000, LENGTH)
    ingress = FakeIngress(ScriptedSource(p=steps))
    connection = Connection(ingress, path, body_of(path, stream=True), "2.4" if how == "send" else "2.3")
    while len(connection.sent) < 3:
        await asyncio.sleep(0)
    connection.send_fails = how == "send"
    if how == "message":
        connection.gone.set()
    elif how == "cancel":
        connection.task.cancel()
    await connection.ended()


@MODES
@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize("also_told", [False, True])
async def test_cancelled_at_any_moment(stream: bool, spec_version: str, also_told: bool) -> None:
    """Ray Serve's way, at every turn of the event loop from the first to the last."""
    for turns in range(1, 500):
        ingress = FakeIngress(ScriptedSource(p=text(0, "abc", LENGTH)))
        connection = Connection(ingress, C, body_of(C, stream=stream), spec_version)
        await spin(turns)
        if connection.task.done():
            break
        if also_told:
            connection.gone.set()
            await spin(turns % 3)
        connection.task.cancel()
        await asyncio.wait({connection.task})
        await spin(5)
        assert ingress.source.open_prompts == []
        assert ingress.num_in_flight == 0
        assert sum(ingress.outcomes().values()) == 1
        if not also_told and ingress.outcomes() != {"ok": 1}:
            await connection.ended()
    assert connection.task.done()
    assert ingress.outcomes() == {"ok": 1}


async def test_gone_before_the_stream_begins() -> None:
    """The first token is there, nothing has been sent: the answer's generator never runs, and still all is closed."""
    ingress = FakeIngress(ScriptedSource(p=[*text(0, "ab"), HANG]))
    connection = Connection(ingress, C, body_of(C, stream=True))
    connection.gone.set()
    await connection.ended()
    assert connection.sent == []


@MODES
async def test_gone_while_it_waits_for_the_first_token(stream: bool) -> None:
    ingress = FakeIngress(ScriptedSource(p=[HANG]))
    connection = Connection(ingress, C, body_of(C, stream=stream))
    while not ingress.source.open_prompts:
        await asyncio.sleep(0.001)
    connection.task.cancel()
    await connection.ended()


async def test_gone_while_it_sends_its_body(caplog: pytest.LogCaptureFixture) -> None:
    """No error of ours: nothing to log."""
    ingress = FakeIngress(ScriptedSource())
    connection = Connection(ingress, C, {})
    connection.incoming[:] = [{"type": "http.request", "body": b'{"prompt"', "more_body": True}]
    connection.gone.set()
    await connection.ended()
    assert "request failed" not in caplog.text
