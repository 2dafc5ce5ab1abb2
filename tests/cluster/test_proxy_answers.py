"""Serve's proxy without an ingress behind it: what a client is told, before and after its answer has begun."""

from __future__ import annotations

import json

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.http.proxy_answers import ProxyAnswers

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def start(status: int = 200, headers: list[tuple[bytes, bytes]] | None = None) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers or []}


def piece(body: bytes, more_body: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more_body}


def says(*messages: Message) -> ASGIApp:
    """As Serve's proxy: passes on what an ingress sent, and returns when that ends. Gives requests an id."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["headers"] = [*scope["headers"], (b"x-request-id", b"made")]
        for message in messages:
            await send(message)

    return app


async def sent(app: ASGIApp, path: str = "/v1/completions", gone: bool = False) -> list[Message]:
    found: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"} if gone else {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        found.append(message)

    await ProxyAnswers(app)({"type": "http", "path": path, "headers": []}, receive, send)
    return found


async def asked(app: ASGIApp) -> httpx.Response:
    transport = httpx.ASGITransport(ProxyAnswers(app), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.post("/v1/completions", json={})


async def test_an_ingress_that_dies_before_its_answer_is_503_in_an_envelope() -> None:
    answer = await asked(says())
    assert (answer.status_code, answer.headers["retry-after"], answer.headers["x-request-id"]) == (503, "1", "made")
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.json()["error"]["code"] == "ingress_lost"


async def test_a_begun_stream_ends_with_an_error_event_and_no_done() -> None:
    messages = await sent(says(start(200, EVENTS), piece(b"data: {}\n\n")))
    assert messages[:2] == [start(200, EVENTS), piece(b"data: {}\n\n")]
    (last,) = messages[2:]
    assert not last["more_body"]
    assert last["body"].startswith(b"data: {")
    assert last["body"].endswith(b"}\n\n")
    assert json.loads(last["body"].removeprefix(b"data: "))["error"]["code"] == "ingress_lost"


async def test_what_is_no_stream_stays_cut() -> None:
    messages = [start(200, [(b"content-length", b"10")]), piece(b"part")]
    assert await sent(says(*messages)) == messages


@pytest.mark.parametrize(
    ("status", "ours", "code"),
    [(408, 504, "timeout"), (500, 503, "no_capacity"), (503, 503, "no_capacity"), (404, 404, None)],
)
async def test_serves_own_words_become_an_envelope(status: int, ours: int, code: str | None) -> None:
    answer = await asked(PlainTextResponse("Request 1 timed out; replica SERVE_REPLICA::x", status))
    assert (answer.status_code, answer.headers["content-type"]) == (ours, "application/json")
    assert answer.json()["error"]["code"] == code
    assert "SERVE_REPLICA" not in answer.text


JSON = [(b"content-type", b"application/json")]
ANSWERS: dict[str, list[Message]] = {
    "whole": [start(200, JSON), piece(b"{}", False)],
    "refused": [start(503, JSON), piece(b"{}", False)],
    "empty": [start(204), {"type": "http.response.body"}],
    "metrics": [start(200, [(b"content-type", b"text/plain; version=0.0.4")]), piece(b"a 1\n", False)],
    "stream": [start(200, EVENTS), piece(b"data: {}\n\n"), piece(b"data: [DONE]\n\n"), piece(b"", False)],
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_ingresss_answers_pass_unchanged(name: str) -> None:
    assert await sent(says(*ANSWERS[name])) == ANSWERS[name]


async def test_serves_health_and_routes_are_its_own() -> None:
    app = PlainTextResponse("draining", 503)
    (begin, body) = await sent(app, "/-/healthz")
    assert (begin["status"], body["body"]) == (503, b"draining")


async def test_nobody_is_told_who_has_gone(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.disconnect"

    assert await sent(app, gone=True) == []
    assert caplog.records == []


async def test_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    await sent(says())
    (record,) = caplog.records
    assert (record.event, record.request_id, record.begun) == ("ingress_lost", "made", False)  # type: ignore[attr-defined]


async def test_a_failure_of_serves_own_is_an_answer_and_raised() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("of Serve")

    answer = await asked(app)
    assert answer.status_code == 503
    with pytest.raises(RuntimeError, match="of Serve"):
        await sent(app)


async def test_other_protocols_pass() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.close"})

    found: list[Message] = []

    async def send(message: Message) -> None:
        found.append(message)

    async def receive() -> Message:
        raise AssertionError

    await ProxyAnswers(app)({"type": "websocket", "path": "/", "headers": []}, receive, send)
    assert found == [{"type": "websocket.close"}]
