"""Headers that Ray Serve's proxy would read: what is left of them when it gets the request."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from cluster.http.proxy_headers import ProxyHeaders, middlewares
from cluster.serving import local_ray

ROOT = Path(__file__).parents[2]

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

    (middleware,) = [it for it in middlewares() if it.cls is ProxyHeaders]
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


_IN_SERVE = """
import asyncio, json
from ray.serve._private.http_util import _apply_middlewares, configure_http_middlewares
from ray.serve.config import HTTPOptions

seen = []

async def app(scope, receive, send):
    seen.extend([name.decode(), value.decode()] for name, value in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": []})

async def send(message):
    seen.append([[name.decode().lower() + " sent", value.decode()] for name, value in message["headers"]])

async def ask(headers):
    wrapped = _apply_middlewares(app, configure_http_middlewares(HTTPOptions()).middlewares)
    await wrapped({"type": "http", "path": "/", "headers": headers}, None, send)

asyncio.run(ask([(b"x-request-id", b"\\xff"), (b"x-session-id", b"\\xff"), (b"x-request-timeout-seconds", b"1")]))
print(json.dumps([list(item) for item in seen]))
"""


def test_serve_finds_it_by_the_name_that_the_serve_command_sets() -> None:
    """In a process of its own, as Serve reads the variable when it is imported. The app is as careless as Serve's."""
    source = inspect.getsource(local_ray)
    (name,) = re.findall(r'"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "([^"]+)"', source)
    environment = {**os.environ, "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": name, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _IN_SERVE], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [["x-request-id", "?"], [["x-request-id sent", "?"]]]
