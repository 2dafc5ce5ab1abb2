"""In Ray Serve's HTTP proxy, around all of Serve: the end of an answer that no ingress gives any more.

An ingress that dies, or never answers, leaves its requests to the proxy, which by itself says 500 without a body, or
cuts a stream that has begun. A client of ours gets an error in OpenAI's envelope instead, a begun stream as its last
event. What is no such stream is cut: its client must not take a part for the whole.
"""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api_error import ApiError
from cluster.http.answers import error_response
from cluster.openai.response import sse_error

logger = logging.getLogger(__name__)

_SERVES_OWN = "/-/"  # its health and its routes
_RETRY_AFTER_S = 1.0


class ProxyAnswers:
    """ASGI: says what Serve leaves unsaid, and what it says in plain text, as an error of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_SERVES_OWN):
            await self._app(scope, receive, send)
            return
        answer = _Answer(receive, send)
        try:
            await self._app(scope, answer.receive, answer.send)
        finally:
            await answer.end(scope)


class _Answer:
    """One answer on its way."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._is_client_gone = False
        self._has_begun = self._is_over = self._is_event_stream = False
        self._refused_with: int | None = None  # the status, where Serve itself answers

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._is_client_gone = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            content_type = _content_type(message)
            if message["status"] >= 400 and content_type.startswith(b"text/plain"):  # an ingress's errors are JSON
                self._refused_with = message["status"]
            self._has_begun = self._refused_with is None
            self._is_event_stream = content_type.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_over = self._has_begun
        if self._has_begun:
            await self._send(message)

    async def end(self, scope: Scope) -> None:
        """What is missing, if anything is and somebody waits for it."""
        if self._is_over or self._is_client_gone:
            return
        request_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        error = _error(self._refused_with)
        extra = {"event": "ingress_lost", "request_id": request_id, "status": error.status, "begun": self._has_begun}
        logger.warning("an answer was ended in place of its ingress: %s", error.message, extra=extra)
        if not self._has_begun:
            headers = {"X-Request-ID": request_id} if request_id else {}
            await error_response(error, headers)(scope, self._receive, self._send)
        elif self._is_event_stream:
            await self._send({"type": "http.response.body", "body": sse_error(error), "more_body": False})


def _content_type(message: Message) -> bytes:
    found: bytes = next((value for name, value in message.get("headers", ()) if name.lower() == b"content-type"), b"")
    return found


def _error(serves_status: int | None) -> ApiError:
    """serves_status: what Serve answers with, None where it has no words."""
    if serves_status is None:
        message = "the process that took this request has ended; it can be sent again"
        return ApiError(503, message, code="ingress_lost", retry_after_s=_RETRY_AFTER_S)
    if serves_status == 408:  # as of its own deadline, not of the client's body
        return ApiError(504, "the process that took this request has not answered in time", code="timeout")
    if serves_status == 404:
        return ApiError(404, "nothing is served under this path")
    message = "no process can take this request now; it can be sent again"
    return ApiError(
        max(serves_status, 503) if serves_status >= 500 else serves_status,
        message,
        code="no_capacity",
        retry_after_s=_RETRY_AFTER_S,
    )
