"""HTTP: routes, bodies in, answers and streams out, errors in OpenAI's envelope. No decisions about generation."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from cluster.api_error import ApiError
from cluster.http.answers import error_response, json_response
from cluster.http.body import receive_body
from cluster.http.cache_tenant import cache_tenant
from cluster.http.client_gone import ClientGone
from cluster.http.client_label import client_label
from cluster.http.event_stream import EventStream
from cluster.http.middleware import add_middleware
from cluster.http.not_served import add_routes_not_served
from cluster.http.openapi_document import openapi_document
from cluster.http.request_id import request_id_of
from cluster.monitoring.metrics_merge import CONTENT_TYPE
from cluster.monitoring.request_timer import RequestTimer, outcome_of
from cluster.openai.caller import Caller
from cluster.openai.generation_body import GenerationBody
from cluster.openai.request import ChatCompletionBody, CompletionBody
from cluster.openai.responses.request import ResponsesBody
from cluster.openai.running_answer import RunningCompletion
from cluster.openai.served_model import check_model, model_card, model_list
from cluster.openai.tokenize_request import DetokenizeBody, TokenizeBody
from cluster.text.generation import TextGeneration
from cluster.version import VERSION

if TYPE_CHECKING:
    from cluster.http.backend import HttpBackend
    from cluster.lifecycle.readiness import Readiness
    from cluster.openai.running_answer import RunningAnswer

logger = logging.getLogger(__name__)

# What can be read can be probed: load balancers ask with HEAD. The server leaves the body of its answer away.
_READ = ["GET", "HEAD"]


def build_http_app(backend: HttpBackend, server_sends_request_id: bool = False) -> ASGIApp:
    """The ASGI app of one ingress replica. Raises ConfigError if its API keys can't be read.

    server_sends_request_id: whether the server that runs it puts X-Request-Id on responses, as Ray Serve does.
    """
    # redirect_slashes would answer with an address made of the client's Host header.
    app = FastAPI(
        title="SplitServe", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    _add_generation_routes(app, backend)
    _add_tokenize_routes(app, backend)
    _add_model_routes(app, backend)
    _add_operation_routes(app, backend)
    _add_documentation_routes(app, backend)
    add_routes_not_served(app)
    app.add_exception_handler(ApiError, _on_api_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _on_http_exception)  # type: ignore[arg-type]
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_exception)
    app.add_middleware(ClientGone)
    wrapped = add_middleware(app, backend.config, lambda: backend.metrics.rejected("auth"), server_sends_request_id)
    return backend.drain.counting(wrapped)


def _add_generation_routes(app: FastAPI, backend: HttpBackend) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _serve_generation(backend, request, ChatCompletionBody, "/v1/chat/completions")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _serve_generation(backend, request, CompletionBody, "/v1/completions")

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await _serve_generation(backend, request, ResponsesBody, "/v1/responses")


def _add_tokenize_routes(app: FastAPI, backend: HttpBackend) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await receive_body(request, TokenizeBody, backend.config.limits, backend.threads)
        return json_response(await backend.tokenize_service.tokenize(body))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await receive_body(request, DetokenizeBody, backend.config.limits, backend.threads)
        return json_response(await backend.tokenize_service.detokenize(body))


def _add_model_routes(app: FastAPI, backend: HttpBackend) -> None:
    served = backend.config.model

    @app.api_route("/v1/models", methods=_READ)
    async def models() -> Response:
        return json_response(
            model_list(backend.config.model.name, backend.started_at, backend.config.model.max_model_len)
        )

    @app.api_route("/v1/models/{model:path}", methods=_READ)
    async def model(model: str) -> Response:
        check_model(model, served.name)
        return json_response(
            model_card(backend.config.model.name, backend.started_at, backend.config.model.max_model_len)
        )


def _add_operation_routes(app: FastAPI, backend: HttpBackend) -> None:
    @app.api_route("/health", methods=_READ)
    async def health() -> Response:
        return json_response({"status": "ok"})

    @app.api_route("/health/ready", methods=_READ)
    async def ready() -> Response:
        found = backend.readiness()
        if found.is_ready:
            return json_response({"status": "ready", **_details(found)})
        details = {"missing_pools": list(found.missing_pools), "reasons": [*found.reasons, *found.notes]}
        return json_response({"status": "not ready", **details}, 503, {"Retry-After": "1"})

    @app.api_route("/version", methods=_READ)
    async def version() -> Response:
        return json_response({"version": VERSION})

    @app.api_route("/metrics", methods=_READ)
    async def metrics() -> Response:
        return Response(await backend.render_metrics(), media_type=CONTENT_TYPE)


def _details(found: Readiness) -> dict[str, Any]:
    """Of one that is ready."""
    details: dict[str, Any] = {"notes": list(found.notes)} if found.notes else {}
    if (read := found.slowest_read) is not None:
        rate = {"gb_per_s": round(read.bytes_per_s / 1e9, 3)}
        details["slowest_transfer"] = {"reader": read.reader_id, "source": read.source_id, **rate}
    return details


def _add_documentation_routes(app: FastAPI, backend: HttpBackend) -> None:
    server = backend.config.server
    if not server.openapi:
        return
    document = openapi_document(
        backend.config.limits, backend.config.auth, backend.config.model.name, backend.sampling_defaults.fields
    )

    @app.api_route("/openapi.json", methods=_READ)
    async def openapi() -> Response:
        return json_response(document)

    if server.docs:

        @app.api_route("/docs", methods=_READ)
        async def docs() -> Response:
            return get_swagger_ui_html(openapi_url="/openapi.json", title="SplitServe")


# -- generation ------------------------------------------------------------------------------------


async def _serve_generation(
    backend: HttpBackend, request: Request, body_class: type[GenerationBody | ResponsesBody], endpoint: str
) -> Response:
    trace = backend.tracing.request(endpoint, request.headers) if backend.tracing is not None else None
    timer = RequestTimer(backend.metrics, endpoint, backend.config.slo, trace)
    request.state.timer = timer
    try:
        backend.drain.check_accepting()
        body = await receive_body(request, body_class, backend.config.limits, backend.threads)
        config, headers = backend.config, request.headers
        caller = Caller(client_label(headers, config.fairness), cache_tenant(headers, config))
        running = await _start(backend, body, timer, caller)
        _log(request, running.generation)
        if body.stream:
            return await _stream(running, timer)
        whole, reasons = await running.whole()
        response = json_response(whole)
        timer.over("ok", reasons)
        return response
    except ApiError as error:
        timer.over(outcome_of(error), [])
        raise
    except (asyncio.CancelledError, ClientDisconnect):
        timer.over("cancelled", [])
        raise
    except Exception:
        timer.over("server_error", [])
        raise


async def _start(
    backend: HttpBackend, body: GenerationBody | ResponsesBody, timer: RequestTimer, caller: Caller
) -> RunningAnswer:
    if isinstance(body, ResponsesBody):
        return await backend.responses_service.start(body, timer, caller)
    if isinstance(body, ChatCompletionBody):
        generation, answer = await backend.service.chat(body, timer, caller)
    else:
        assert isinstance(body, CompletionBody)
        generation, answer = await backend.service.completion(body, timer, caller)
    return RunningCompletion(generation, answer, body.n)


async def _stream(running: RunningAnswer, timer: RequestTimer) -> Response:
    """Headers leave only with the first token: what fails before is still a plain HTTP error."""
    deltas = running.generation.deltas()
    first = await anext(deltas)  # if this raises, the deltas have ended with it
    return EventStream(first, deltas, running.events(), timer)


def _log(request: Request, generation: TextGeneration) -> None:
    """Which of our ids, those in all further lines, belong to the client's."""
    if logger.isEnabledFor(logging.DEBUG):
        extra = {
            "event": "accepted",
            "request_id": request_id_of(request.scope),
            "generations": generation.generation_ids,
        }
        logger.debug("request accepted", extra=extra)


# -- errors ----------------------------------------------------------------------------------------


async def _on_api_error(request: Request, error: ApiError) -> Response:
    request.state.error_code = error.code
    extra = {
        "event": "refused" if error.status < 500 else "failed",
        "request_id": request_id_of(request.scope),
        "path": request.url.path[:200],
        "status": error.status,
        "code": error.code,
        "param": error.param,
    }
    logger.info("request answered with an error", extra=extra)
    return error_response(error)


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    message = str(error.detail)
    if error.status_code in (404, 405):
        path = request.url.path[:200]
        message = f"{message}: {request.method} {path}. The API is under /v1, such as POST /v1/chat/completions"
    return error_response(ApiError(error.status_code, message), dict(error.headers or {}))


async def _on_disconnect(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # gone while it sent its body: nobody reads this


async def _on_exception(request: Request, error: Exception) -> Response:
    extra = {"event": "request_failed", "request_id": request_id_of(request.scope)}
    logger.error("request failed", exc_info=error, extra=extra)
    message = "internal error; the server's log has more, under this response's X-Request-Id"
    return error_response(ApiError(500, message))
