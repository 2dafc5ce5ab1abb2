"""In Ray Serve's HTTP proxy, before anything of Serve: request headers that Serve would take for its own.

Serve's proxy reads some headers of every request by itself. Clients must not steer it by them, and it answers 500 where
one is no UTF-8. `middlewares` is what RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names; `splitserve serve` sets it.
Serve calls it before it makes the proxy's server.
"""

from __future__ import annotations

from ray.util.metrics import Counter
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.http.proxy_answers import ProxyAnswers
from cluster.http.proxy_expect import ProxyExpect
from cluster.http.proxy_protocol import bound_connections

_REQUEST_ID = b"x-request-id"
# Which replica a request goes to, how long the proxy waits for it, and whether it notices that the client has gone.
_STEERING = frozenset(
    {
        b"serve-multiplexed-model-id",
        b"x-session-id",
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
    }
)
# What the ingress refuses, with a proper answer.
_NO_REQUEST_ID = b"?"


class ProxyHeaders:
    """ASGI: takes Serve's own headers off the request, and makes an id that Serve can't read one that the ingress
    refuses.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            scope = {**scope, "headers": _accepted(scope["headers"])}
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What Serve puts around its proxy, the innermost first. Bounds what one connection may take, too.

    No ingress hears of a slow reader that is cut here but as of a client that has gone: so the count is one of Ray's
    own metrics, which every node of a cluster publishes.
    """
    slow_readers = Counter("splitserve_proxy_slow_readers", description="Clients that did not read their answers: cut")
    bound_connections(slow_readers.inc)
    return [Middleware(ProxyAnswers), Middleware(ProxyHeaders), Middleware(ProxyExpect)]


def _accepted(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [
        (name, _NO_REQUEST_ID if name == _REQUEST_ID and not value.isascii() else value)
        for name, value in headers
        if name.replace(b"_", b"-") not in _STEERING
    ]
