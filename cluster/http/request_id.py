"""X-Request-Id: the client's name for a request, or ours, on every response and in the log. Never used inside:
two requests may come with the same one."""

from __future__ import annotations

import re
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api_error import ApiError
from cluster.http.answers import error_response

_HEADER = b"x-request-id"
_VALID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIdMiddleware:
    """ASGI: takes the id from the header, or makes one where there is none or no valid one (see RequestIdCheck).

    is_sent: whether the server around it puts the id on responses, and makes one where the client gave none. Ray Serve
    does both, and would put a second one beside ours.
    """

    def __init__(self, app: ASGIApp, is_sent: bool) -> None:
        self._app = app
        self._is_sent = is_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == _HEADER]
        is_valid = len(given) <= 1 and all(_VALID.fullmatch(value) for value in given)
        request_id = given[0] if given and is_valid else f"req-{uuid.uuid4().hex}".encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and not self._is_sent:
                message = {**message, "headers": [*message.get("headers", ()), (_HEADER, request_id)]}
            await send(message)

        scope.setdefault("state", {})["request_id"] = request_id.decode()
        scope["state"]["has_wrong_request_id"] = not is_valid
        await self._app(scope, receive, send_with_id)


class RequestIdCheck:
    """ASGI: answers with 400 where the client gave something that is no valid id. Inside of RequestIdMiddleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["state"]["has_wrong_request_id"]:
            await error_response(_refusal())(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def request_id_of(scope: Scope) -> str:
    """The id of the request that this ASGI scope belongs to; empty where the middleware is not in use."""
    state: dict[str, Any] = scope.get("state", {})
    return str(state.get("request_id", ""))


def _refusal() -> ApiError:
    message = "X-Request-Id must be 1 to 128 letters, digits or characters of . _ : / + = @ -"
    return ApiError(400, message, param="X-Request-Id", code="invalid_request_id")
