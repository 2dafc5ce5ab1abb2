"""API keys: who may call what."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api_error import ApiError
from cluster.http.answers import error_response
from cluster.user_error import ConfigError

if TYPE_CHECKING:
    from cluster.config.access import AuthConfig

_MIN_KEY_CHARS = 8


class ApiKeys:
    """Some keys, kept as digests only."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def accept(self, key: bytes) -> bool:
        """Whether it is one of them. Takes as long whichever it is, and however much of it is right."""
        digest = _digest(key)
        # All are compared, whatever the first ones give; and digests, so that no key's length shows either.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def load_api_keys(config: AuthConfig) -> ApiKeys | None:
    """The keys of the file and of the environment variable; None when access is open. Reads the file.

    Raises ConfigError if what is named is not there, or has no keys: it must not open the server to everybody.
    """
    if not config.is_on:
        return None
    keys: list[str] = []
    if config.api_keys_file is not None:
        try:
            lines = [line.strip() for line in config.api_keys_file.read_text("utf-8-sig").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"auth.api_keys_file: {config.api_keys_file} cannot be read: {error}") from None
        keys += [line for line in lines if line and not line.startswith("#")]
    if config.api_keys_env is not None:
        keys += [key.strip() for key in os.environ.get(config.api_keys_env, "").split(",") if key.strip()]
    if not keys:
        sources = [source for source in (config.api_keys_file, config.api_keys_env) if source is not None]
        raise ConfigError(f"auth: no API keys in {' and '.join(map(str, sources))}; add one, or remove the setting")
    if min(map(len, keys)) < _MIN_KEY_CHARS:
        raise ConfigError(f"auth: an API key has fewer than {_MIN_KEY_CHARS} characters; choose longer ones")
    return ApiKeys(keys)


class AuthMiddleware:
    """ASGI: lets requests pass that have a key, or whose path needs none. Looks at the path only, never at Host."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, public_paths: Iterable[str], on_refusal: Callable[[], None]
    ) -> None:
        self._app = app
        self._keys = keys
        self._public_paths = frozenset(public_paths)
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._public_paths and not self._is_allowed(scope):
            self._on_refusal()
            await error_response(_refusal(), {"WWW-Authenticate": "Bearer"})(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        key = bearer_key(scope["headers"])
        return key is not None and self._keys.accept(key)


def bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key that a request was sent with; None of one without, or with several. headers: as ASGI has them."""
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1 or not values[0].startswith(b"Bearer "):
        return None
    return values[0].removeprefix(b"Bearer ").strip()


def _refusal() -> ApiError:
    return ApiError(401, "this server needs an API key, sent as: Authorization: Bearer <key>", code="invalid_api_key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
