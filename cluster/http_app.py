"""HTTP: routes, bodies in, answers and streams out, errors in OpenAI's envelope. No decisions about generation."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from cluster import openai_response as openai
from cluster.api_error import ApiError
from cluster.client_label import client_label
from cluster.metrics_merge import CONTENT_TYPE
from cluster.openai_body import parse_body
from cluster.openai_request import ChatCompletionBody, CompletionBody, GenerationBody
from cluster.request_timer import RequestTimer
from cluster.text_choice import TextDelta
from cluster.text_generation import TextGeneration
from cluster.version import VERSION

if TYPE_CHECKING:
    from cluster.ingress import Ingress

logger = logging.getLogger(__name__)

_JSON = "application/json"
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def build_http_app(ingress: Ingress) -> FastAPI:
    """The ASGI app of one ingress replica."""
    app = FastAPI(title="SplitServe", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    _add_generation_routes(app, ingress)
    _add_model_routes(app, ingress)
    _add_operation_routes(app, ingress)
    app.add_exception_handler(ApiError, _on_api_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _on_http_exception)  # type: ignore[arg-type]
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_exception)
    return app


def _add_generation_routes(app: FastAPI, ingress: Ingress) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _serve_generation(ingress, request, ChatCompletionBody, "/v1/chat/completions")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _serve_generation(ingress, request, CompletionBody, "/v1/completions")


def _add_model_routes(app: FastAPI, ingress: Ingress) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return _json(openai.model_list(ingress.model_name, ingress.started_at, ingress.max_model_len))

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if model != ingress.model_name:
            raise ApiError(404, f"the model {model[:100]!r} does not exist", param="model", code="model_not_found")
        return _json(openai.model_card(ingress.model_name, ingress.started_at, ingress.max_model_len))


def _add_operation_routes(app: FastAPI, ingress: Ingress) -> None:
    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/health/ready")
    async def ready() -> Response:
        missing = ingress.missing_pools()
        if missing:
            return _json({"status": "not ready", "missing_pools": missing}, 503)
        return _json({"status": "ready"})

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": VERSION})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await ingress.render_metrics(), media_type=CONTENT_TYPE)


# -- generation ------------------------------------------------------------------------------------


async def _serve_generation(
    ingress: Ingress, request: Request, body_class: type[GenerationBody], endpoint: str
) -> Response:
    timer = RequestTimer(ingress.metrics, endpoint)
    try:
        raw = await _read_body(request, ingress.limits.max_body_bytes)
        body = parse_body(raw, request.headers.get("content-type"), body_class, ingress.limits)
        if isinstance(body, ChatCompletionBody):
            generation, answer = await ingress.service.chat(body, timer)
        else:
            assert isinstance(body, CompletionBody)
            generation, answer = await ingress.service.completion(body, timer)
        generation.stand_in_line(-body.priority, client_label(request.headers, ingress.fairness))
        if body.stream:
            return await _stream(generation, answer, timer)
        return await _whole(generation, answer, timer)
    except ApiError as error:
        timer.over(_outcome(error), [])
        raise
    except (asyncio.CancelledError, ClientDisconnect):
        timer.over("cancelled", [])
        raise
    except Exception:
        timer.over("server_error", [])
        raise


async def _whole(generation: TextGeneration, answer: openai.Answer, timer: RequestTimer) -> Response:
    texts: dict[int, str] = {}
    ids: defaultdict[int, list[int]] = defaultdict(list)
    reasons: dict[int, str] = {}
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            texts[delta.index] = texts.get(delta.index, "") + delta.text
            ids[delta.index].append(delta.token_id)
            if delta.finish_reason is not None:
                reasons[delta.index] = delta.finish_reason
    choices = [
        openai.Choice(index, texts[index], reasons[index], tuple(ids[index]) if answer.return_token_ids else None)
        for index in sorted(texts)
    ]
    response = _json(answer.whole(choices, generation.usage))
    timer.over("ok", list(reasons.values()))
    return response


async def _stream(generation: TextGeneration, answer: openai.Answer, timer: RequestTimer) -> Response:
    """Headers leave only with the first token: what fails before is still a plain HTTP error."""
    deltas = generation.deltas()
    first = await anext(deltas)  # if this raises, the deltas have ended with it
    return _EventStream(first, deltas, generation, answer, timer)


class _EventStream(StreamingResponse):
    """A streamed answer. However it ends, even before it began: its generation is closed, its outcome counted once."""

    def __init__(
        self,
        first: TextDelta,
        deltas: AsyncGenerator[TextDelta, None],
        generation: TextGeneration,
        answer: openai.Answer,
        timer: RequestTimer,
    ) -> None:
        self._first, self._deltas, self._generation = first, deltas, generation
        self._answer, self._timer = answer, timer
        self._reasons: list[str] = []
        self._outcome = "cancelled"  # unless it comes to another end
        self._bytes = self._events()
        super().__init__(self._bytes, media_type="text/event-stream", headers=_STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            # Not left to the generators' own `finally`: one that waits for its consumer ends when it is collected.
            self._timer.over(self._outcome, self._reasons)
            await self._bytes.aclose()
            await self._deltas.aclose()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        opened: set[int] = set()
        try:
            for event in _chunks(self._first, self._answer, opened, self._reasons):
                yield event
            async for delta in self._deltas:
                for event in _chunks(delta, self._answer, opened, self._reasons):
                    yield event
            if self._answer.include_usage:
                yield openai.sse_event(self._answer.usage_chunk(self._generation.usage))
            self._outcome = "ok"
            yield openai.SSE_DONE
        except ApiError as error:
            self._outcome = _outcome(error)
            yield openai.sse_error(error)
        except Exception:
            self._outcome = "server_error"
            logger.exception("stream failed", extra={"event": "stream_failed"})
            yield openai.sse_error(ApiError(500, "internal error; the server's log has more"))


def _chunks(delta: TextDelta, answer: openai.Answer, opened: set[int], reasons: list[str]) -> list[bytes]:
    chunks: list[dict[str, Any]] = []
    if delta.index not in opened:
        opened.add(delta.index)
        opening = answer.opening(delta.index)
        chunks += [opening] if opening is not None else []
    if delta.text or answer.return_token_ids:
        ids = (delta.token_id,) if answer.return_token_ids else None
        chunks.append(answer.delta(delta.index, delta.text, ids))
    if delta.finish_reason is not None:
        reasons.append(delta.finish_reason)
        chunks.append(answer.finish(delta.index, delta.finish_reason))
    return [openai.sse_event(chunk) for chunk in chunks]


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """The body, or ApiError 413 as soon as it is known to be too long."""
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise ApiError(413, f"the body has more than {max_bytes} bytes, the most allowed", code="body_too_large")
        parts.append(part)
    return b"".join(parts)


# -- answers ---------------------------------------------------------------------------------------


def _json(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(openai.json_bytes(value), status, headers, _JSON)


def _outcome(error: ApiError) -> str:
    """As in splitserve_requests_total."""
    if error.status in (429, 503):
        return "rejected"
    if error.status == 504:
        return "timeout"
    return "client_error" if error.status < 500 else "server_error"


async def _on_api_error(_: Request, error: ApiError) -> Response:
    return _json(error.envelope(), error.status, error.headers())


async def _on_http_exception(_: Request, error: HTTPException) -> Response:
    return _json(
        ApiError(error.status_code, str(error.detail)).envelope(), error.status_code, dict(error.headers or {})
    )


async def _on_disconnect(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # gone while it sent its body: nobody reads this


async def _on_exception(_: Request, error: Exception) -> Response:
    logger.error("request failed", exc_info=error, extra={"event": "request_failed"})
    return _json(ApiError(500, "internal error; the server's log has more").envelope(), 500)
