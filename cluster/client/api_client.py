"""A client of an OpenAI-compatible server: one request at a time, errors in one line."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from cluster.user_error import UserError

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "SPLITSERVE_API_KEY"
_MAX_SHOWN_CHARS = 300


def server_url(text: str) -> str:
    """ "127.0.0.1:8000", with a scheme or without, with "/v1" or without: the base of all paths. Raises UserError."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number
        is_good = False
    if not is_good:
        raise UserError(f"{text}: is no address of a server; expected one such as {DEFAULT_URL}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def key_headers(variable: str = KEY_VARIABLE) -> dict[str, str]:
    """What shows the API key that an environment variable holds; nothing without one."""
    key = os.environ.get(variable, "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True, slots=True)
class ApiClient:
    """url: as of `server_url`. timeout_s: of each wait for more bytes. Blocks."""

    url: str
    headers: Mapping[str, str]
    timeout_s: float = 600.0

    def model(self) -> str:
        """The name of the first model that it serves. Raises UserError."""
        with self._response("GET", "/v1/models") as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise UserError(f"{self.url}/v1/models: names no model; is it an OpenAI-compatible server?") from None

    def chat_events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed chat completion, as they come. Raises UserError; so for an error within the stream,
        and for a stream that ends without its end."""
        with self._response("POST", "/v1/chat/completions", {**body, "stream": True}) as response:
            while line := response.readline():
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    return
                event = _parsed(payload)
                if "error" in event:
                    raise UserError(f"the answer broke off: {_reason(payload)}")
                yield event
        raise UserError("the answer broke off: the connection was closed before its end")

    @contextmanager
    def _response(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None, "server_url has seen to that"
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=self.timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout_s)
        data = None if body is None else json.dumps(body).encode()
        headers = dict(self.headers) | ({"Content-Type": "application/json"} if data is not None else {})
        try:
            connection.request(method, parts.path + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise UserError(f"{self.url}: status {response.status}: {_reason(response.read())}{_hint(response)}")
            yield response
        except ConnectionRefusedError:
            raise UserError(f"{self.url}: nobody listens there; is the server running, and ready?") from None
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"{self.url}: {str(error) or type(error).__name__}") from None
        finally:
            connection.close()


def _hint(response: http.client.HTTPResponse) -> str:
    return f" (its API key goes into the environment variable {KEY_VARIABLE})" if response.status == 401 else ""


def _parsed(payload: bytes) -> dict[str, Any]:
    try:
        event = json.loads(payload)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise UserError(f"the answer is no JSON: {_one_line(payload.decode(errors='replace'))}")
    return event


def _reason(body: bytes) -> str:
    """Of an error, in one line: the envelope's message, or what there is instead."""
    try:
        return _one_line(str(json.loads(body)["error"]["message"]))
    except (ValueError, LookupError, TypeError):
        return _one_line(body.decode(errors="replace")) or "no reason given"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_SHOWN_CHARS]
