"""The one exception that becomes an HTTP error answer."""

from __future__ import annotations

import math
from typing import Any

_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A failure that the client is told about, in OpenAI's shape.

    The message goes to the client as it is: it names fields, limits and numbers, never prompt text or internals.
    param: the field at fault ("messages[0].content"), if one is. code: a stable word for programs ("unsupported").
    type: OpenAI's error class; derived from the status when not given.
    is_final: clients that by themselves send a request again after such a status are told not to.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        is_final: bool = False,
    ) -> None:
        # Every argument goes to super(): that is what pickle calls the class with, on the other side of an actor call.
        super().__init__(status, message, type, param, code, retry_after_s, is_final)
        self.status = status
        self.message = message
        self.type = type or _default_type(status)
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.is_final = is_final

    def __str__(self) -> str:
        return self.message

    def envelope(self) -> dict[str, Any]:
        """The response body; also the data of an SSE error event."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Response headers that belong to this error. Retry-After is whole seconds, rounded up, at least 1; OpenAI's
        clients go by X-Should-Retry."""
        if self.is_final:
            return {"X-Should-Retry": "false"}
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


def _default_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return _TYPE_OF_STATUS.get(status, "invalid_request_error")
