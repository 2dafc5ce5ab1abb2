"""Reading the body of an HTTP request, within bounds of size and time, and checking it."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

from fastapi import Request

from cluster.api_error import ApiError
from cluster.openai.body import Body, parse_body
from cluster.text.work_threads import LONG

if TYPE_CHECKING:
    from cluster.config.limits import LimitsConfig
    from cluster.text.work_threads import WorkThreads


async def receive_body(request: Request, model: type[Body], limits: LimitsConfig, threads: WorkThreads) -> Body:
    """The body, valid. Raises ApiError, see read_body and parse_body."""
    raw = await read_body(request, limits)
    content_type = request.headers.get("content-type")
    if len(raw) <= LONG:  # milliseconds at worst
        return parse_body(raw, content_type, model, limits)
    return await threads.run(len(raw), _parse_long_body, raw, content_type, model, limits)


def _parse_long_body(raw: bytes, content_type: str | None, model: type[Body], limits: LimitsConfig) -> Body:
    """Without garbage collection: it would look at all of a million new objects several times, and stop every thread
    while it does. None of them is part of a cycle.

    Two of these may run at a time (`WorkThreads`). Each puts it on again, not back as it was found: one that finds it
    off, as the other has not ended yet, would leave it off for good. Who ends later may have it on for a while.
    """
    gc.disable()
    try:
        return parse_body(raw, content_type, model, limits)
    finally:
        gc.enable()


async def read_body(request: Request, limits: LimitsConfig) -> bytes:
    """Raises ApiError: 400 if compressed, 413 once it is known to be too long, 408 when it has not come in time."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        message = "compressed bodies are not supported: send it without Content-Encoding"
        raise ApiError(400, message, param="Content-Encoding", code="unsupported_content_encoding")
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > limits.max_body_bytes:
        raise _too_long(limits)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _read(request, limits)
    except TimeoutError:
        message = f"the body has not come within {limits.body_timeout_s:g} seconds"
        raise ApiError(408, message, code="body_timeout") from None


async def _read(request: Request, limits: LimitsConfig) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > limits.max_body_bytes:
            raise _too_long(limits)
        parts.append(part)
    return b"".join(parts)


def _too_long(limits: LimitsConfig) -> ApiError:
    message = f"the body has more than {limits.max_body_bytes} bytes, the most allowed"
    return ApiError(413, message, code="body_too_large")
