"""In Ray Serve's HTTP proxy: a client that asks before it sends a body hears the answer, not just "go on".

With `Expect: 100-continue` a client sends the head alone and waits. The server says 100 when somebody asks for the
body, which Serve's proxy does at once, before an ingress has seen the head. So the body of a request that is refused by
its head (too long, without a key, for no such path) was sent in vain. Here the ingress's word is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# An ingress answers in some milliseconds by the head alone, or not before it has the body. curl sends after 1 s anyhow.
PATIENCE_S = 0.5


class ProxyExpect:
    """ASGI: of a client that waits for "go on" nothing is read until an answer without its body would have come."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _waits(scope):
            await self._app(scope, receive, send)
            return
        question = _Question(receive, send)
        await self._app(scope, question.receive, question.send)


class _Question:
    """A request whose body the client has not sent yet."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._is_body_wanted = False
        self._answered = asyncio.Event()

    async def receive(self) -> Message:
        """As the server's, which says "go on" when it is asked, if no answer has begun by then."""
        if not self._is_body_wanted:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._answered.wait()
            self._is_body_wanted = True
        return await self._receive()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not self._is_body_wanted:
            # The client may still send the body or not: nobody could tell where its next request begins.
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await self._send(message)
        self._answered.set()


def _waits(scope: Scope) -> bool:
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])
