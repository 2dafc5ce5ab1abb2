"""ASGI middleware: a line in the log for each request when it is over. No text of prompts or answers."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cluster.monitoring.request_timer import RequestTimer

logger = logging.getLogger(__name__)

# Asked every few seconds by whoever watches over the server.
_UNTOLD = frozenset({"/health", "/health/ready", "/metrics"})
_MOST_PATH_CHARS = 200
_CLIENT_GONE = 499  # as nginx has it: there was nobody to answer


class AccessLog:
    """Inside of RequestIdMiddleware. The route leaves in the scope's state what it knows: `timer`, of a request that
    generates, and `error_code`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNTOLD or not logger.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        status = _CLIENT_GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            _tell(scope, status, time.monotonic() - began_s)


def _tell(scope: Scope, status: int, duration_s: float) -> None:
    state: dict[str, Any] = scope["state"]
    method, path = scope["method"], scope["path"][:_MOST_PATH_CHARS]
    extra: dict[str, Any] = {"event": "access", "method": method, "path": path, "status": status}
    timer: RequestTimer | None = state.get("timer")
    if timer is not None:
        account = timer.account
        if account.num_prompt_tokens:
            extra["tokens_in"], extra["tokens_out"] = account.num_prompt_tokens, account.num_tokens
        if account.num_cached_tokens:
            extra["tokens_cached"] = account.num_cached_tokens
        if account.ttft_s is not None:
            extra["ttft_s"] = round(account.ttft_s, 3)
        if account.outcome != "ok":
            extra["outcome"] = account.outcome
    if (code := state.get("error_code")) is not None:
        extra["code"] = code
    extra["duration_s"] = round(duration_s, 3)
    extra["request_id"] = state["request_id"]
    logger.info("%s %s %d", method, path, status, extra=extra)
