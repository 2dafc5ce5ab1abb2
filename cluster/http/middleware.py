"""What every HTTP request passes before it reaches its route, outermost first: its id is found, its line for the log,
CORS, a wrong id is refused, API keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from cluster.http.access_log import AccessLog
from cluster.http.auth import AuthMiddleware, load_api_keys
from cluster.http.request_id import RequestIdCheck, RequestIdMiddleware

if TYPE_CHECKING:
    from cluster.config.access import CorsConfig
    from cluster.config.serving import ServingConfig


def add_middleware(
    app: ASGIApp, config: ServingConfig, on_refusal: Callable[[], None], sends_request_id: bool
) -> ASGIApp:
    """Around the whole app, its answers to unexpected errors included.

    on_refusal: a request came without a key. sends_request_id: whether the server does so, see RequestIdMiddleware.
    Raises ConfigError if the API keys can't be read.
    """
    keys = load_api_keys(config.auth)
    if keys is not None:
        app = AuthMiddleware(app, keys, config.auth.public_paths, on_refusal)
    app = RequestIdCheck(app)
    if config.cors.allow_origins:
        # Outside of all that refuses: a browser asks without a key whether it may ask, and shows no error without
        # these headers.
        app = _cors(app, config.cors)
    if config.logging.access:
        app = AccessLog(app)
    return RequestIdMiddleware(app, is_sent=sends_request_id)


def _cors(app: ASGIApp, config: CorsConfig) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=config.allow_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_credentials=config.allow_credentials,
        expose_headers=["X-Request-Id", "Retry-After"],
        max_age=config.max_age_s,
    )
