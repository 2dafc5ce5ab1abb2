"""A client of the HTTP app without a network: the whole app, over fakes of the model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.cluster.fake_ingress import FakeIngress
from tests.cluster.letter_source import LetterSource

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "hi"}]


class ApiClient:
    def __init__(self, ingress: FakeIngress, http: httpx.AsyncClient) -> None:
        self.ingress, self.http = ingress, http

    async def send(self, path: str, fields: dict[str, Any] | bytes, stream: bool = False) -> httpx.Response:
        """fields: beside the smallest valid body; or a whole body in bytes."""
        if isinstance(fields, bytes):
            return await self.http.post(path, content=fields, headers={"content-type": "application/json"})
        smallest: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, RESPONSES: {"input": "hi"}}
        body = dict(smallest.get(path, {"prompt": "hi"}))
        body |= fields | ({"stream": True} if stream else {})
        # Not json=: that would not write NaN, lone surrogates and the like as we mean them.
        return await self.send(path, json.dumps(body).encode())

    async def events(self, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream but the closing [DONE], which must be there."""
        response = await self.send(path, fields, stream=True)
        assert response.status_code == 200, response.text
        events = events_in(response.content)
        assert events[-1] == "[DONE]"
        return events[:-1]


def events_in(content: bytes) -> list[Any]:
    """The events of a stream: JSON decoded, "[DONE]" as it is."""
    *blocks, rest = content.split(b"\n\n")
    assert rest == b""
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks)
    return [block[6:].decode() if block == b"data: [DONE]" else json.loads(block[6:]) for block in blocks]


@asynccontextmanager
async def api_client(
    sections: dict[str, Any] | None = None, headers: dict[str, str] | None = None, **limits: float
) -> AsyncIterator[ApiClient]:
    """sections: of the config; limits: keys of its limits. In the end nothing may be in flight."""
    ingress = FakeIngress(LetterSource(), sections, **limits)
    transport = httpx.ASGITransport(app=ingress.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as http:
        try:
            yield ApiClient(ingress, http)
        finally:
            ingress.compiler.close()
    assert ingress.num_in_flight == 0
