"""Routes of what clients may look for and is not served: a 404 that says why, and what to use instead."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from cluster.api_error import ApiError
from cluster.http.answers import json_response
from cluster.http.request_id import request_id_of

# To whatever method: a client would take 405 for a mistake of its own.
_ALL = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
# What the Responses API has below its path that is no stored response.
_OTHERS = {
    "": "leave the slash at the end away: POST /v1/responses",
    "compact": "nothing is compacted here: shorten input yourself",
    "input_tokens": "tokens are counted by POST /tokenize",
}


def add_routes_not_served(app: FastAPI) -> None:
    """Behind those of what is served."""

    @app.api_route("/v1/responses/{rest:path}", methods=_ALL)
    async def stored_response(rest: str) -> Response:
        message = _OTHERS.get(rest, "responses are not stored here: keep them, and send their items in input")
        raise ApiError(404, message, code="not_stored" if rest not in _OTHERS else "not_served")

    @app.api_route("/v1/conversations", methods=_ALL)
    @app.api_route("/v1/conversations/{rest:path}", methods=_ALL)
    async def stored_conversation(rest: str = "") -> Response:
        message = "conversations are not stored here: keep their items, and send them in input of POST /v1/responses"
        raise ApiError(404, message, code="not_stored")

    @app.api_route("/v1/messages", methods=_ALL)
    @app.api_route("/v1/messages/{rest:path}", methods=_ALL)
    async def anthropic_messages(request: Request, rest: str = "") -> Response:
        return _anthropic_refusal(request)


def _anthropic_refusal(request: Request) -> Response:
    """In the envelope of Anthropic's clients, who alone look for it."""
    message = "Anthropic's Messages API is not served here: use POST /v1/chat/completions, or a proxy that translates"
    error = {"type": "not_found_error", "message": message}
    return json_response({"type": "error", "error": error, "request_id": request_id_of(request.scope)}, 404)
