"""ASGI middleware: a client that went, told in ASGI's own word."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)


class ClientGone:
    """Ray Serve's proxy holds the connection. When the client goes, or the proxy dies, `receive` raises what Ray's own
    call to the proxy ended with; the app gets `http.disconnect` instead, as from any other server.
    """

    def __init__(self, app: ASGIApp) -> None:
        from ray.exceptions import RayError

        self._app = app
        self._ray_error = RayError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_or_gone() -> Message:
            try:
                return await receive()
            except self._ray_error as error:
                logger.info("client gone", extra={"event": "client_gone", "told_by": type(error).__name__})
                return {"type": "http.disconnect"}

        await self._app(scope, receive_or_gone if scope["type"] == "http" else receive, send)
