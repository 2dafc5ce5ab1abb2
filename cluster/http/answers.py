"""HTTP responses in JSON, errors in OpenAI's envelope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from cluster.api_error import ApiError


def json_response(value: Mapping[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """UTF-8, not escaped further than JSON demands."""
    return Response(orjson.dumps(value), status, headers, "application/json")


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    """With the headers that belong to the error, and further ones."""
    return json_response(error.envelope(), error.status, error.headers() | (headers or {}))
