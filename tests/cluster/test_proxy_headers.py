"""Headers that Ray Serve's proxy would read: what is left of them when it gets the request."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from cluster.proxy_headers import middlewares

STEERING = [
    (b"serve_multiplexed_model_id", b"m"),
    (b"serve-multiplexed-model-id", b"m"),
    (b"x-session-id", b"\xff"),
    (b"x_session_id", b"s"),
    (b"x-request-timeout-seconds", b"0.001"),
    (b"x-request-disconnect-disabled", b"?1"),
]
OTHERS = [(b"host", b"x"), (b"user-agent", b"caf\xe9"), (b"authorization", b"Bearer k"), (b"x-request-id", b"a b")]


async def passed(kind: str, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["headers"])

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    (middleware,) = middlewares()
    await middleware.cls(app, *middleware.args, **middleware.kwargs)(
        {"type": kind, "headers": headers}, nothing, nothing
    )
    return list(seen[0])


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_what_steers_serve_is_taken_off(kind: str) -> None:
    assert await passed(kind, [*STEERING[:4], *OTHERS, *STEERING[4:]]) == OTHERS


@pytest.mark.parametrize("value", [b"\xff", "ä".encode(), b"a\x80"])
async def test_an_id_that_serve_cannot_read_becomes_one_that_is_refused(value: bytes) -> None:
    assert await passed("http", [(b"x-request-id", value)]) == [(b"x-request-id", b"?")]
